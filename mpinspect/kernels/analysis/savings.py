"""Estimate the time that products could save, from the rates of sibling kernels or from the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpinspect.kernels.analysis.rates import Bound, SiblingRates, bound
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.runtime.gpus import Gpu


@dataclass(frozen=True)
class Saving:
    """The *estimated* time that a change could save, and the basis of the estimate.

    Args:
        way: the change: "TF32", "FP16 or BF16", "aligned", ...
        saved_us: saved time over all runs, at least 0.
        basis: "sibling kernels" (the median rate of native products of the same trace, kind and dtype and of similar size) or
            "roofline" (an upper bound, since no kernel is faster).
        limited_by: the limit of the product after the change: "math" or "memory".
    """

    way: str
    saved_us: float
    basis: str
    limited_by: str


#: Causes of the shape rule whose products are as fast without Tensor Cores, regardless of dtype and alignment.
_NOTHING_TO_GAIN = ("matrix-vector", "depthwise", "empty", "raises")

#: Duration of the shortest kernels in real traces (A100, H100), regardless of their work.
SHORTEST_KERNEL_US = 1.0

SIBLINGS, ROOFLINE = "sibling kernels", "roofline"


def savings(rows: Sequence[KernelRow], siblings: SiblingRates) -> tuple[Saving, ...]:
    """Return a saving for each change that would help equal runs (same product, kernel and verdict)."""
    return tuple(saving for way, dtype in ways(rows[0]) if (saving := _saving(rows, way, dtype, siblings)) is not None)


def can_gain(row: KernelRow) -> bool:
    """Return whether Tensor Cores could be faster: not for matrix-vector products, depthwise convolutions and the like.

    Such products are memory-bound on any unit.
    """
    if row.kind == "gemv" or (row.shape is not None and row.shape.cause in _NOTHING_TO_GAIN):
        return False
    return row.named.rule != "depthwise-convolution"


def ways(row: KernelRow) -> Iterator[tuple[str, str]]:
    """Yield the changes that would bring a product to Tensor Cores at full speed, each with its resulting dtype."""
    if row.verdict == "degraded":
        # The name or the shape rule gives the reason for a slow kernel; a rate only shows that it was slow.
        is_known = row.basis == "name" or row.held_back
        yield "aligned" if is_known else "at full speed", row.dtype
    elif row.dtype == "float32":
        if row.gpu.multiplies("float32"):
            yield "TF32", "float32"
        half = half_precision(row.gpu)
        if half:
            yield half[0], half[1]
    elif row.gpu.multiplies(row.dtype):
        yield "Tensor Cores", row.dtype
    elif row.dtype == "bfloat16" and row.gpu.multiplies("float16"):
        yield "FP16", "float16"


def half_precision(gpu: Gpu) -> tuple[str, str] | None:
    """Return the 16-bit dtypes that a GPU's Tensor Cores multiply, in words and as one dtype; None without a known one."""
    if gpu.multiplies("bfloat16"):
        return "FP16 or BF16", "bfloat16"
    if gpu.multiplies("float16"):
        return "FP16", "float16"
    return None


def _saving(rows: Sequence[KernelRow], way: str, dtype: str, siblings: SiblingRates) -> Saving | None:
    spent = least = expected = 0.0
    by_siblings, limits = True, {"math": 0.0, "memory": 0.0}
    known: dict[tuple[int, float | None], tuple[Bound, float | None]] = {}
    for row in rows:
        # Kernels of one call share its FLOPs unevenly; most runs have the same.
        key = id(row.matmul), row.flops
        if key not in known:
            if (floor := bound(row, dtype)) is None:
                return None
            known[key] = floor, _time_of_siblings(row, dtype, floor, siblings)
        floor, typical = known[key]
        by_siblings = by_siblings and typical is not None
        spent, least = spent + row.time_us, least + max(floor.time_us, SHORTEST_KERNEL_US)
        expected += max(typical or 0.0, SHORTEST_KERNEL_US)
        limits[floor.limited_by] += floor.time_us
    left, basis = (expected, SIBLINGS) if by_siblings else (least, ROOFLINE)
    # On a tie, memory.
    limited_by = max(("memory", "math"), key=limits.__getitem__)
    return Saving(way, max(0.0, spent - left), basis, limited_by)


def _time_of_siblings(row: KernelRow, dtype: str, floor: Bound, siblings: SiblingRates) -> float | None:
    """Return the run's time at its siblings' median rate, but at least the roofline's time; None without siblings."""
    if row.flops is None or dtype != row.dtype:
        return None
    rate = siblings.of(row)
    return max(row.flops / rate / 1e6, floor.time_us) if rate else None
