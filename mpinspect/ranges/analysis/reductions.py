"""Whose sums would overflow if a reduction over the whole tensor were kept in FP16: norms, means, variances, losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpinspect.numeric.exponents import Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.kinds import UPDATE
from mpinspect.ranges.session import TensorKey, TensorWindow

CERTAIN, POSSIBLE, NO = "certain", "possible", "no"


@dataclass(frozen=True)
class ReductionReport:
    """The sums over one tensor of average size: of |x| (an L1 norm, and what bounds the plain sum), and of x^2.

    ``sum_abs`` and ``sum_squares`` are per sample, bounds and estimate of the average; the verdicts are "certain" (in at
    least one sample), "possible" or "no" (not in an average sample).
    """

    key: TensorKey
    sum_abs: Interval
    sum_squares: Interval
    sum_abs_overflows: str
    sum_squares_overflow: str

    @property
    def overflows(self) -> bool:
        """Whether either sum certainly overflows."""
        return CERTAIN in (self.sum_abs_overflows, self.sum_squares_overflow)


def reduction_reports(totals: Mapping[TensorKey, TensorWindow], format: FloatFormat) -> tuple[ReductionReport, ...]:
    """A report for every tensor with a value (updates aside), unscaled values."""
    return tuple(
        reduction_report(key, window, format)
        for key, window in totals.items()
        if key.kind != UPDATE and window.samples and len(window.histogram.counts)
    )


def reduction_report(key: TensorKey, window: TensorWindow, format: FloatFormat) -> ReductionReport:
    """The sums of an average sample: the totals over the number of samples. If the average overflows, some sample does."""
    first = _per_sample(window.histogram.sum_abs(), window.samples)
    second = _per_sample(window.histogram.sum_squares(), window.samples)
    return ReductionReport(key, first, second, _verdict(first, format), _verdict(second, format))


def _per_sample(total: Interval, samples: int) -> Interval:
    return Interval(total.estimate / samples, total.low / samples, total.high / samples)


def _verdict(value: Interval, format: FloatFormat) -> str:
    if value.low >= format.overflow_edge:
        return CERTAIN
    return POSSIBLE if value.high >= format.overflow_edge else NO
