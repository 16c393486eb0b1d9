"""The count that one takes by ``grep 884``: how many of the products ran in kernels whose names say Tensor Core."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow

#: Families of Tensor Core kernels by what their names spell, most telling first.
_FAMILIES = tuple(
    (label, re.compile(pattern, re.IGNORECASE))
    for label, pattern in (
        ("flash attention", r"flash"),
        ("fused attention", r"fmha|sdpa"),
        ("nvjet", r"nvjet"),
        ("wmma 161616", r"161616"),
        ("16816", r"16816"),
        ("16832", r"16832"),
        ("1688", r"1688"),
        ("884", r"884"),
        ("wgmma", r"wgmma"),
        ("xmma", r"xmma"),
        ("hmma", r"hmma"),
        ("tensorop", r"tensorop"),
    )
)
_PLURALS = {"gemm": "GEMMs", "convolution": "convolutions", "attention": "attention kernels", "recurrent": "recurrent"}
#: Families named; more than these are "...".
_MOST = 3


def phrase(rows: Sequence[KernelRow]) -> str:
    """ "884 kernels: 12 of 12 GEMMs"; families most time first; "" without products. Matrix-vector products are no GEMMs here."""
    products = [row for row in rows if row.is_product and row.kind != "gemv"]
    if not products:
        return ""
    on = [row for row in products if row.verdict in ON_TENSOR_CORES]
    return f"{_heading(on, products)}: {', '.join(_counts(products))}"


def _heading(on: list[KernelRow], products: list[KernelRow]) -> str:
    time: dict[str, float] = defaultdict(float)
    for row in on:
        time[_family(row.name)] += row.time_us
    # Volta's users look for 884; so do those whose Volta ran none.
    if set(time) <= {"884"} and all(row.gpu.architecture == "volta" for row in products):
        return "884 kernels"
    names = [name for name in sorted(time, key=lambda name: -time[name]) if name]
    if not names:
        return "Tensor Core kernels"
    return f"Tensor Core kernels ({', '.join(names[:_MOST])}{', ...' if len(names) > _MOST else ''})"


def _counts(products: list[KernelRow]) -> list[str]:
    found = []
    for kind in dict.fromkeys(("gemm", "convolution", "attention", "recurrent", *(row.kind for row in products))):
        of_kind = [row for row in products if row.kind == kind]
        if of_kind:
            on = sum(row.verdict in ON_TENSOR_CORES for row in of_kind)
            unknown = sum(row.verdict == "unknown" for row in of_kind)
            rest = f" ({unknown:,} unknown)" if unknown else ""
            found.append(f"{on:,} of {len(of_kind):,} {_PLURALS.get(kind, 'other products')}{rest}")
    return found


@lru_cache(maxsize=1 << 14)
def _family(name: str) -> str:
    return next((label for label, pattern in _FAMILIES if pattern.search(name)), "")
