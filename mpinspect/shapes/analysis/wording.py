"""Word dtypes, counts and the names of many modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BRANDS = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8 E4M3",
    "float8_e5m2": "FP8 E5M2",
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
    patterns: dict[tuple[str | None, ...], list[str]] = {}
    for name in dict.fromkeys(names):
        patterns.setdefault(tuple(None if _is_number(part) else part for part in name.split(".")), []).append(name)
    return {_filled(found): found for found in patterns.values()}


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _filled(names: Sequence[str]) -> str:
    """Merge paths that differ only in numbers into one, with each number replaced by the span of its values."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(
        _span(sorted({int(part) for part in parts})) if _is_number(parts[0]) else parts[0] for parts in columns
    )


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    shown = ",".join(map(str, values[:4]))
    return f"{{{shown},...}}" if len(values) > 4 else f"{{{shown}}}"


#: Words for the place of products outside every submodule and without a weight.
OUTSIDE = "code outside of submodules (the model's own, or the script's)"


def some_modules(names: Iterable[str], limit: int = 3) -> str:
    """Name the first groups of modules, and the number of the others."""
    found = [name or "the model itself" for name in grouped(names)]
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def count(number: int, noun: str) -> str:
    """Return "1 product" or "1,234 products"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
