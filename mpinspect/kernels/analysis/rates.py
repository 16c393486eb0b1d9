"""Compute rooflines, and correct verdicts by achieved rates: a name can be silent or wrong, a measured rate cannot.

No kernel is faster than max(FLOPs / peak, bytes / bandwidth) (Williams, Waterman, Patterson, "Roofline", CACM 2009). All
results are *estimates*: FLOPs follow from the operator's shapes, and peaks from data sheets at boost clock (``runtime.gpus``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow
from mpinspect.runtime.gpus import Gpu, rate_key
from mpinspect.shapes.records import ITEM_SIZES

#: A kernel this many times faster than the CUDA cores' data-sheet peak did not run on CUDA cores. Cards run up to some 15% above
#: their data sheet's boost clock (consumer cards most); the profiler measures kernels this long to within a percent.
ABOVE_PEAK = 1.2
#: How many times faster an algorithm with fewer operations can seem: Winograd's F(4x4, 3x3) multiplies 4 times less than direct
#: convolution (Lavin and Gray, 2015), a causal mask halves attention. cuBLAS computes its products directly.
_FEWER_OPERATIONS = {"gemm": 1.0, "convolution": 4.0, "attention": 2.0}

#: Kernels shorter than this (in us) are not judged by rate: launch, first loads and the last partial wave matter too much.
SHORTEST_US = 20.0
#: Siblings are native products of the same trace, GPU, kind and dtype whose FLOPs differ by at most this factor.
SIMILAR = 4.0
#: Least number of siblings whose median counts as typical.
FEWEST_SIBLINGS = 3
#: A product is degraded by rate if it is slower than the median sibling by more than a nearly empty last wave (2x) and a
#: throttled clock (1.5x) together explain ...
FAR_UNDER_SIBLINGS = 1 / 4
#: ... or slower than the roofline by more than this, at a size for which healthy kernels reach at least 40% of it. On an H100
#: an align1 kernel reaches 51 of 989 TFLOP/s where its siblings reach 520.
FAR_UNDER_ROOFLINE = 1 / 12


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a product, in us, by its arithmetic and by its memory traffic."""

    math_us: float
    memory_us: float

    @property
    def time_us(self) -> float:
        return max(self.math_us, self.memory_us)

    @property
    def limited_by(self) -> str:
        return "math" if self.math_us > self.memory_us else "memory"


def bound(row: KernelRow, dtype: str = "") -> Bound | None:
    """Return the bound of a run's product on its GPU's Tensor Cores; None if FLOPs or rates are unknown.

    ``dtype``: the dtype to assume instead of the row's dtype; memory traffic changes with the size of an element.
    """
    chosen = dtype or row.dtype
    return _bound(row, chosen, tensor_core_peak(row.gpu, chosen))


def bound_as_run(row: KernelRow) -> Bound | None:
    """Return the bound on the units that the run used: CUDA cores if the verdict is "off", else Tensor Cores."""
    peak = tensor_core_peak if row.verdict in ON_TENSOR_CORES else cuda_core_peak
    return _bound(row, row.dtype, peak(row.gpu, row.dtype))


def tensor_core_peak(gpu: Gpu, dtype: str) -> float | None:
    """Return the Tensor Cores' TFLOP/s ("float32": TF32's); None if unknown or if they do not multiply the dtype."""
    return gpu.tensor_core_tflops.get(rate_key(dtype))


def cuda_core_peak(gpu: Gpu, dtype: str) -> float | None:
    """Return the CUDA cores' TFLOP/s (for BF16 the rate of FP16, which is at least as high); None if unknown."""
    return gpu.cuda_core_tflops.get("float16" if dtype == "bfloat16" else dtype)


def _bound(row: KernelRow, dtype: str, peak: float | None) -> Bound | None:
    if row.matmul is None or row.flops is None or not peak or not row.gpu.bandwidth_gb_s or row.matmul.flops <= 0:
        return None
    # Runs that share a call share the call's traffic in proportion to their FLOPs.
    traffic = row.matmul.bytes * row.flops / row.matmul.flops * _width(dtype) / _width(row.dtype)
    return Bound(math_us=row.flops / peak / 1e6, memory_us=traffic / row.gpu.bandwidth_gb_s / 1e3)


def _width(dtype: str) -> int:
    return ITEM_SIZES.get(dtype, 4)


def checked_by_rate(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """Return the rows in the same order, with verdicts by rate where the rate contradicts or completes the name's verdict.

    Runs of equal name and product are judged together, by their median rate: a single run may have been delayed.
    """
    found = list(rows)
    groups = _equal_runs(found)
    for group in groups:
        _change(found, group, _impossible(found[group.typical]))
    for group in groups:
        _change(found, group, _above_cuda_cores(found[group.typical]))
    siblings = SiblingRates(found)
    for group in groups:
        _change(found, group, _far_under(found[group.typical], siblings))
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """The indices of equal runs; ``typical`` is the run with the median rate."""

    runs: tuple[int, ...]
    typical: int


@dataclass(frozen=True, slots=True)
class _Change:
    """A correction for all runs of a group: another verdict, or, if ``verdict`` is None, FLOPs that become unknown."""

    verdict: str | None = None
    reason: str = ""


class SiblingRates:
    """Compute the median rate of a product's siblings (see SIMILAR)."""

    def __init__(self, rows: Iterable[KernelRow]) -> None:
        found: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            if row.verdict == "native" and row.flops is not None and (rate := row.tflops) is not None:
                found[_family(row)].append((row.flops, rate))
        # By family the siblings' FLOPs in order, and their rates: one family may have every kernel of a trace.
        self._known = {key: np.array(sorted(pairs)).T for key, pairs in found.items()}
        self._cache: dict[tuple[object, ...], float | None] = {}

    def of(self, row: KernelRow) -> float | None:
        """Return the median rate in TFLOP/s; None if the product's FLOPs are unknown or it has too few siblings."""
        if row.flops is None:
            return None
        key = (*_family(row), row.flops)
        if key not in self._cache:
            self._cache[key] = self._median(self._known.get(_family(row)), row.flops)
        return self._cache[key]

    @staticmethod
    def _median(known: NDArray[np.float64] | None, flops: float) -> float | None:
        if known is None:
            return None
        first = np.searchsorted(known[0], flops / SIMILAR)
        last = np.searchsorted(known[0], flops * SIMILAR, "right")
        if last - first < FEWEST_SIBLINGS:
            return None
        return float(np.median(known[1, first:last]))


def _family(row: KernelRow) -> tuple[object, ...]:
    return row.trace, row.device, row.kind, row.dtype


def _equal_runs(rows: Sequence[KernelRow]) -> list[_Group]:
    """Group the runs whose rates are known by trace, device, verdict, name and product."""
    groups: dict[tuple[object, ...], list[tuple[float, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        rate = row.tflops
        if rate is not None:
            groups[row.trace, row.device, row.verdict, row.name, id(row.matmul)].append((rate, index))
    return [_Group(tuple(index for _, index in runs), sorted(runs)[len(runs) // 2][1]) for runs in groups.values()]


def _change(rows: list[KernelRow], group: _Group, change: _Change | None) -> None:
    if change is None:
        return
    for index in group.runs:
        if change.verdict is None:
            rows[index] = replace(rows[index], flops=None)
        else:
            rows[index] = replace(rows[index], verdict=change.verdict, basis="rate", reason=change.reason)


def _impossible(row: KernelRow) -> _Change | None:
    """Drop FLOPs that not even Tensor Cores could compute in the time: other kernels must have computed part of them."""
    peak = max(filter(None, (tensor_core_peak(row.gpu, row.dtype), cuda_core_peak(row.gpu, row.dtype))), default=None)
    fewer = _FEWER_OPERATIONS.get(row.kind, 1.0)
    if peak is None or row.tflops is None or row.tflops <= ABOVE_PEAK * fewer * peak:
        return None
    return _Change()


def _above_cuda_cores(row: KernelRow) -> _Change | None:
    """Change to native a product that is off or unknown by its name, but faster than CUDA cores can be."""
    rate, peak, fewer = row.tflops, cuda_core_peak(row.gpu, row.dtype), _FEWER_OPERATIONS.get(row.kind)
    if row.verdict not in ("off", "unknown") or rate is None or peak is None or fewer is None:
        return None
    # A convolution that is off by name may be Winograd's or an FFT's: fewer operations, by any factor.
    if not row.gpu.multiplies(row.dtype) or (row.kind == "convolution" and row.verdict == "off"):
        return None
    if row.time_us < SHORTEST_US or rate <= ABOVE_PEAK * fewer * peak:
        return None
    reason = f"by its rate, about {rate:.3g} TFLOP/s: this GPU's CUDA cores reach at most {peak:g} in {row.dtype}"
    if row.verdict == "off":
        reason += f", though its name says otherwise ({row.reason})"
    return _Change("native", reason)


def _far_under(row: KernelRow, siblings: SiblingRates) -> _Change | None:
    """Change to degraded a product that is native by its name, but far slower than its siblings or the roofline."""
    # Softmax in attention and steps in recurrent layers take time without counted FLOPs, so these kinds are not judged.
    if row.verdict != "native" or row.basis == "rate" or row.kind not in ("gemm", "convolution"):
        return None
    least, rate = bound(row), row.tflops
    if least is None or rate is None or row.time_us < SHORTEST_US or least.limited_by != "math":
        return None
    usual = siblings.of(row)
    if usual is not None and rate < FAR_UNDER_SIBLINGS * usual:
        how = f"about {rate:.3g} TFLOP/s, where similar products in this trace reach {usual:.3g}"
    # The roofline's own time must be long enough to be judged too.
    elif SHORTEST_US <= least.time_us < FAR_UNDER_ROOFLINE * row.time_us:
        peak = tensor_core_peak(row.gpu, row.dtype)
        how = f"about {rate:.3g} TFLOP/s, where this GPU's Tensor Cores reach {peak:g}"
    else:
        return None
    return _Change("degraded", f"by its rate, {how}; {row.reason}")
