"""Word dtypes and the names of many modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mpinspect.reporting.words import and_more

#: Layer numbers in a dotted path.
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")

_BRANDS = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8 E4M3",
    "float8_e5m2": "FP8 E5M2",
    "float4_e2m1fn_x2": "FP4 E2M1",
    "int8": "INT8",
}


def dtype_name(dtype: str) -> str:
    """Return a dtype's usual name: "FP16" for "float16"; unknown names unchanged."""
    return _BRANDS.get(dtype, dtype)


def grouped(names: Iterable[str]) -> list[str]:
    """Merge dotted paths that differ only in layer numbers: "encoder.layer.{0..11}.query". The order of first mention stays."""
    return list(members(names))


def members(names: Iterable[str]) -> dict[str, list[str]]:
    """Merge paths as ``grouped`` does; return the original paths of each merged one."""
    patterns: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        patterns.setdefault(_NUMBER.sub("\0", name), []).append(name)
    return {_filled(found): found for found in patterns.values()}


def _filled(names: Sequence[str]) -> str:
    """Merge paths that differ only in numbers into one, with each number replaced by the span of its values."""
    if len(names) == 1:
        return names[0]
    spans = map(_span, zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    return _NUMBER.sub(lambda _: next(spans), names[0])


def _span(numbers: Iterable[int]) -> str:
    values = sorted(set(numbers))
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    shown = [str(value) for value in values[:4]]
    if len(values) > 4:
        shown.append("...")
    return f"{{{','.join(shown)}}}"


#: Words for the place of products outside every submodule and without a weight.
OUTSIDE = "code outside of submodules (the model's own, or the script's)"


def some_modules(names: Iterable[str], limit: int = 3) -> str:
    """Name the first groups of modules, and the number of the others."""
    found = [name or "the model itself" for name in grouped(names)]
    return ", ".join(found[:limit]) + and_more(len(found) - limit)
