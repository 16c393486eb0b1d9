"""Bound what mixed precision and Tensor Cores can still save: Amdahl's law over rooflines and widths of number formats."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpinspect.kernels.analysis.products import dtypes_of
from mpinspect.kernels.analysis.ranks import RankReport
from mpinspect.kernels.analysis.rates import bound, bound_as_run, tensor_core_peak
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.savings import can_gain, half_precision, ways
from mpinspect.kernels.analysis.shares import share


@dataclass(frozen=True)
class Limits:
    """The limits of the kernels, and the most that mixed precision and Tensor Cores can still save (Amdahl's law).

    Kernel times are summed: if two kernels run at once on two streams, both count.

    Args:
        span_us: from the first start to the last end on the GPU, summed over devices.
        idle_us: the part of the span without a kernel or copy running; a lower precision does not shorten it.
        copies_us: time of memory copies and memsets.
        communication_us: time of communication kernels, such as NCCL's.
        math_limited_us: time of matrix products that are compute-bound by the roofline of the units that they ran on.
        memory_limited_us: time of other matrix products and of all other kernels (elementwise, normalisation, reduction and
            copy kernels are assumed to be memory-bound).
        unknown_us: time of matrix products whose FLOPs, or whose GPU's rates, are unknown.
        saved_at_most_us: upper bounds of the savings, by cause.
        speedup_at_most: the bound span / (span - all savings); None without kernels or if the savings reach the span.
        kernel_speedup_at_most: the same bound for kernel time alone, as if the GPU were never idle.
        assumptions: clauses that the bounds assume.
    """

    span_us: float
    idle_us: float
    copies_us: float
    communication_us: float
    math_limited_us: float
    memory_limited_us: float
    unknown_us: float
    saved_at_most_us: dict[str, float]
    speedup_at_most: float | None
    kernel_speedup_at_most: float | None
    assumptions: tuple[str, ...]

    @property
    def idle_fraction(self) -> float | None:
        """Return the idle share of the span; None if nothing ran on a GPU."""
        return share(self.idle_us, self.span_us)


#: Patterns of names, and whether such a kernel uses FP32 or wider. The first match counts: the name of a 16-bit kernel often
#: contains float too, its accumulator's dtype.
_WIDTHS = (
    (re.compile(r"bfloat16|half|__nv_bf|fp16|bf16|(?<![a-z0-9])f16_|float8|fp8|e4m3|e5m2", re.IGNORECASE), False),
    (re.compile(r"(?<![a-z0-9_])(?:float|double)(?![a-z0-9_])|fp32|_f32|f32_", re.IGNORECASE), True),
    # Template arguments of torch's integer functors. Elsewhere in a name, int, long and bool are indices and flags.
    (
        re.compile(
            r"(?:Functor\w*|ReduceOp|func_wrapper_t)<(?:bool|(?:(?:un)?signed )?(?:char|short|int|long(?: long)?))[,> ]"
        ),
        False,
    ),
)
#: Tensor Cores in 16 bits are at most so many times as fast as CUDA cores in FP32 (B200: 2,250 and 80 TFLOP/s).
_MOST_SPEEDUP = 28.0
_LAYOUT = re.compile(r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)


#: Cache by kernel name: a trace has many kernels but few names.
_remembered = lru_cache(maxsize=1 << 14)


@_remembered
def is_layout_conversion(name: str) -> bool:
    """Return whether the kernel copies between NCHW and NHWC for a convolution (cuDNN's names)."""
    return _LAYOUT.search(name) is not None


def is_wide(row: KernelRow) -> bool | None:
    """Return whether a kernel uses FP32 or wider, by its name, else by its operator's dtypes; None if unknown."""
    by_name = _wide_by_name(row.name)
    if by_name is not None:
        return by_name
    dtypes = dtypes_of(row.kernel.op)
    if not dtypes:
        return None
    return not {"float32", "float64", "complex64", "complex128"}.isdisjoint(dtypes)


@_remembered
def _wide_by_name(name: str) -> bool | None:
    return next((is_wide for pattern, is_wide in _WIDTHS if pattern.search(name)), None)


_PRODUCTS = {"off": "products off Tensor Cores", "degraded": "degraded products", "unknown": "products that may be off"}
_WIDE, _MAY_BE_WIDE = "other FP32 kernels in 16 bits", "other kernels of unknown dtype, were they FP32"
#: Causes of savings, in the order of reports.
CAUSES = (*_PRODUCTS.values(), "native TF32 products in 16 bits", _WIDE, _MAY_BE_WIDE, "layout conversions")

_ASSUMPTIONS = (
    "products reach their roofline, in the narrowest dtype of 16 bits or more that the GPU's Tensor Cores multiply",
    "where FLOPs or rates are unknown, all the time of a product that is off or degraded counts as saved",
    "all other kernels are memory-limited: FP32 kernels, except optimizers', take half as long in 16 bits, and kernels of "
    "unknown dtype count as FP32",
    "layout conversions vanish (channels_last)",
    "native 16-bit and FP8 products, communication, copies and idle time stay as they are",
)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The limit of a kernel, and the most that each of its runs can save for ``cause``; without a cause ``factor`` is 0."""

    limited_by: str
    cause: str = ""
    least_us: float = 0.0
    factor: float = 0.0

    def saved_at_most_us(self, time_us: float) -> float:
        """Return the upper bound of the saving of a run that took ``time_us``."""
        return max(0.0, time_us - self.least_us) * self.factor


def limits(rows: Sequence[KernelRow], ranks: Iterable[RankReport]) -> Limits:
    """Return the bounds of the savings over all traces together."""
    parts = tuple(ranks)
    kinds = {"math": 0.0, "memory": 0.0, "unknown": 0.0, "communication": 0.0}
    saved = dict.fromkeys(CAUSES, 0.0)
    for row, outlook in outlooks(rows):
        kinds[outlook.limited_by] += row.time_us
        if outlook.cause:
            saved[outlook.cause] += outlook.saved_at_most_us(row.time_us)
    saved_us = sum(saved.values())
    if not rows or not all(row.gpu.has_tensor_cores for row in rows):
        # Without rates there is no bound.
        saved_us = math.inf
    span = sum(device.span_us for part in parts for device in part.devices)
    busy = sum(device.busy_us for part in parts for device in part.devices)
    return Limits(
        span_us=span,
        idle_us=max(0.0, span - busy),
        copies_us=sum(part.copies_us for part in parts),
        communication_us=kinds["communication"],
        math_limited_us=kinds["math"],
        memory_limited_us=kinds["memory"],
        unknown_us=kinds["unknown"],
        saved_at_most_us=saved,
        speedup_at_most=_speedup(span, saved_us),
        kernel_speedup_at_most=_speedup(sum(kinds.values()), saved_us),
        assumptions=_ASSUMPTIONS,
    )


def outlooks(rows: Iterable[KernelRow]) -> Iterator[tuple[KernelRow, Outlook]]:
    known: dict[tuple[object, ...], Outlook] = {}
    for row in rows:
        # Keyed by identity, since hashing shapes takes longer than all the rest; the rows hold references to the objects.
        same = (row.name, row.verdict, id(row.gpu), id(row.matmul), id(row.kernel.op), row.flops, row.dtype, row.phase)
        if same not in known:
            known[same] = _outlook(row)
        yield row, known[same]


def _speedup(span: float, saved: float) -> float | None:
    """Return the bound; None without a span, or if it is above any GPU's ratio: the savings then rest on unknown FLOPs."""
    if span <= saved or span > _MOST_SPEEDUP * (span - saved):
        return None
    return span / (span - saved)


def _outlook(row: KernelRow) -> Outlook:
    if row.is_communication:
        return Outlook("communication")
    is_product = row.is_product and can_gain(row)
    limited_by = _limit(row, is_product=is_product)
    if not row.gpu.has_tensor_cores:
        return Outlook(limited_by)
    if row.verdict == "native":
        return Outlook(limited_by, "native TF32 products in 16 bits", factor=_tf32_gain(row))
    if is_product:
        least = _least(row)
        if least is None:
            return Outlook(limited_by)
        return Outlook(limited_by, _PRODUCTS[row.verdict], least, 1.0)
    if is_layout_conversion(row.name):
        return Outlook(limited_by, "layout conversions", factor=1.0)
    wide = is_wide(row)
    if row.phase == "optimizer" or wide is False:
        return Outlook(limited_by)
    return Outlook(limited_by, _WIDE if wide else _MAY_BE_WIDE, factor=0.5)


def _limit(row: KernelRow, *, is_product: bool) -> str:
    if not is_product:
        return "memory"
    run = bound_as_run(row)
    return "unknown" if run is None else run.limited_by


def _least(row: KernelRow) -> float | None:
    """Return the least time in us that a change could bring the product to.

    The result is 0 if the roofline or the dtype is unknown, and None if no change would help.
    """
    if not row.dtype or row.dtype.startswith("complex"):
        return 0.0
    chosen = [dtype for _, dtype in ways(row)]
    if row.verdict == "unknown":
        chosen = [row.dtype]
    bounds = [bound(row, dtype) for dtype in chosen]
    if None in bounds:
        return 0.0
    return min((least.time_us for least in bounds if least is not None), default=None)


def _tf32_gain(row: KernelRow) -> float:
    """Return the share of a native TF32 product's time that 16 bits save at most: by the ratio of peaks, else half."""
    half = half_precision(row.gpu)
    if row.dtype != "float32" or half is None:
        return 0.0
    wide, narrow = tensor_core_peak(row.gpu, "float32"), tensor_core_peak(row.gpu, half[1])
    if not wide or not narrow:
        return 0.5
    return max(0.0, 1 - wide / narrow)
