"""The report on one tensor: a format's effect on its counted values."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.serving import least_log2_scale
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow


@dataclass(frozen=True)
class LayerReport:
    """The effect of FP16, or of another format judged, on one tensor over the whole run at loss scale 1.

    Args:
        name, kind, module, module_type: as in TensorInfo.
        samples: number of times the tensor was counted; 0 if never seen.
        histogram: unscaled counts, or None if never seen.
        range_offset: unused powers of two at the top of the format; None without a finite non-zero value.
        flushed_fraction: share of the non-zero elements that flush. If no value was flushed before counting, the share is
            measured and the three figures are equal. If the values had passed through a narrow format, the estimate covers the
            visible values, and the bounds assume that no zero or every zero was a flushed value. If samples represent different
            numbers of steps, it is an estimate over the run with the lowest and highest bound of any block.
        already_flushed_fraction: share of the non-zero elements that was flushed before counting, as bounds (the estimate
            equals the lower bound, as the counts allow no better one); None if no value can have been flushed.
        floor_exponent: visibility floor, see TensorWindow.
        subnormal_fraction: share of the visible non-zero elements that survive with fewer bits.
        overflowed: number of finite elements beyond the format's range (an upper bound if not exact).
        lost_l1_share: flushed share of the L1 mass, as an estimate with bounds, over the run like ``flushed_fraction``.
        noise_to_signal: estimated noise-to-signal ratio; inf if something overflows.
        log2_scale_needed: least k >= 0 with a lost L1 share within the tolerance, over the run and in each of its blocks; None
            without a finite non-zero value.
        max_log2_scale: largest k without overflow.
        lost_updates: lost updates by storage format, for the kind "update" only.
        rounding_noise: True if the gradient is zero in theory and holds only rounding noise, which a scale need not preserve.
        weighed: the counts behind the shares, where samples represent different numbers of steps; None: ``histogram``.
    """

    name: str
    kind: str
    module: str
    module_type: str
    samples: int
    histogram: ExponentHistogram | None
    range_offset: int | None = None
    flushed_fraction: Interval | None = None
    already_flushed_fraction: Interval | None = None
    floor_exponent: int | None = None
    subnormal_fraction: float | None = None
    overflowed: int | None = None
    lost_l1_share: Interval | None = None
    noise_to_signal: float | None = None
    log2_scale_needed: int | None = None
    max_log2_scale: int | None = None
    lost_updates: dict[str, LostUpdates] | None = None
    rounding_noise: bool = False
    weighed: ExponentHistogram | None = None

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.name, self.kind)

    @property
    def representative(self) -> ExponentHistogram | None:
        """The counts behind the shares; None if never seen."""
        return self.weighed or self.histogram

    @property
    def max_exponent(self) -> int | None:
        """The largest exponent of its finite non-zero elements; None without any."""
        if self.histogram is None or not self.histogram.nonzero:
            return None
        return self.histogram.max_exponent


def layer_report(
    info: TensorInfo,
    window: TensorWindow | None,
    format: FloatFormat,
    *,
    log2_scale: int = 0,
    rounding_noise: bool = False,
) -> LayerReport:
    """Return the report on one tensor's values times 2^log2_scale in ``format``; its figures are None if never seen.

    ``log2_scale_needed``, ``max_log2_scale`` and ``range_offset`` always refer to the unscaled values.
    """
    if window is None or not window.samples:
        return LayerReport(info.name, info.kind, info.module, info.module_type, 0, None)
    histogram, seen = window.histogram, Visibility.of(window)
    needed = least_log2_scale(histogram, format)
    return LayerReport(
        name=info.name,
        kind=info.kind,
        module=info.module,
        module_type=info.module_type,
        samples=window.samples,
        histogram=histogram,
        range_offset=histogram.range_offset(format),
        flushed_fraction=seen.flushed_fraction(format, log2_scale),
        already_flushed_fraction=seen.already_flushed_fraction(),
        floor_exponent=window.floor_exponent,
        subnormal_fraction=histogram.subnormal_fraction(format, log2_scale),
        overflowed=histogram.overflowed_bounds(format, log2_scale)[1],
        lost_l1_share=seen.lost_l1_share(format, log2_scale),
        noise_to_signal=histogram.noise_to_signal(format, log2_scale),
        log2_scale_needed=None if needed is None else max(needed, 0),
        max_log2_scale=histogram.max_log2_scale(format),
        lost_updates=dict(window.lost_updates) or None,
        rounding_noise=rounding_noise,
    )
