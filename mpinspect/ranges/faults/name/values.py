"""Values and sums that would overflow, which no loss scale can prevent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.precision import holds_without_scale
from mpinspect.ranges.faults.name.case import MOST_LAYERS_LISTED, Case
from mpinspect.ranges.faults.name.fault import Fault, Found
from mpinspect.ranges.kinds import ACTIVATION, UPDATE, WEIGHT, phrase
from mpinspect.ranges.session import module_named
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow
from mpinspect.reporting.sentences import Sentences
from mpinspect.reporting.words import by_number, format_name, number_of


class _Values(Sentences):
    WOULD_OVERFLOW = (
        "In {format:format} {tensor} would overflow: the largest is {max_abs:.3g}, the format's maximum is {end:g}."
    )
    WIDER = "Compute {module} in FP32 or BF16; a loss scale does not change it."


def _values_overflow(case: Case) -> Iterator[Found]:
    """Activations or weights that would overflow.

    False alarms: In a run that holds them in a wider format the severity is info.
    """
    over = [
        (layer, layer.histogram.max_abs)
        for layer in case.layers
        if layer.kind in (ACTIVATION, WEIGHT) and layer.overflowed and layer.histogram
    ]
    if not over:
        return
    worst, largest = max(over, key=lambda pair: pair[1])
    yield Found(
        _Values.WOULD_OVERFLOW,
        {
            "max_abs": largest,
            "overflowed": worst.overflowed,
            "layers": [layer.name for layer, _ in over[:MOST_LAYERS_LISTED]],
            "layers_count": len(over),
        },
        {
            "format": case.format.name,
            "tensor": phrase(worst.name, worst.kind),
            "end": case.format.max_finite,
            "module": module_named(worst.name),
        },
        _Values.WIDER,
        layer=worst.name,
        is_mild=bool(holds_without_scale(case.session, [layer.key for layer, _ in over])),
    )


class _Sums(Sentences):
    WOULD_OVERFLOW = (
        "Sums over a whole tensor would overflow {format:format} in {number}: the sum of squares of {tensor} averages about "
        "{sum_squares:.1g} (estimated)."
    )
    HELD_WITHOUT_SCALE = "{spared}"
    ONE_IS_HELD = "The run holds it in {dtypes}."
    ARE_HELD = "The run holds them in {dtypes}."
    IN_FP32 = "Compute such sums (norms, means, variances, losses) in FP32, where the script does not already."


def _reductions_overflow(case: Case) -> Iterator[Found]:
    """Sums over whole tensors that would overflow.

    False alarms: The severity is info: whether the script computes such a sum is not known.
    """
    reports = reduction_reports(case.totals, case.format)
    over = [report for report in reports if report.overflows]
    if case.advised.diverged or not over:
        return
    # FP32 weights have FP32 gradients under autocast too, and sums of these are FP32.
    in_format = [report for report in over if case.format.name in case.totals[report.key].dtypes]
    dtypes = {name: 0 for report in over for name in case.totals[report.key].dtypes}
    spared = holds_without_scale(case.session, [report.key for report in over])
    in_fp32 = by_number(len(over), _Sums.ONE_IS_HELD, _Sums.ARE_HELD)
    held = _Sums.HELD_WITHOUT_SCALE.when(spared) or in_fp32.when(not in_format)
    largest = max(in_format or over, key=lambda report: report.sum_squares.estimate)
    number = number_of(len(over), "tensor")
    yield Found(
        (_Sums.WOULD_OVERFLOW, held),
        {
            "sum_abs": largest.sum_abs.estimate,
            "sum_squares": largest.sum_squares.estimate,
            "tensors": {
                f"{report.key.name} ({report.key.kind})": [report.sum_abs_overflows, report.sum_squares_overflow]
                for report in over[:MOST_LAYERS_LISTED]
            },
            "tensors_count": len(over),
        },
        {
            "format": case.format.name,
            "number": f"at least {number}" if any(report.may_overflow for report in reports) else number,
            "tensor": phrase(*largest.key),
            "spared": spared,
            "dtypes": " and ".join(map(format_name, dtypes)),
        },
        _Sums.IN_FP32.when(not held),
        layer=largest.key.name,
    )


CERTAIN, POSSIBLE, NO = "certain", "possible", "no"


@dataclass(frozen=True)
class ReductionReport:
    """The sums of |x| (the L1 norm, which bounds the plain sum) and of x^2 over one tensor, averaged over its samples.

    ``sum_abs`` and ``sum_squares`` are the average per sample, as an estimate with bounds. The two verdicts on overflow
    are "certain" (in at least one sample), "possible", or "no" (not in an average sample).
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

    @property
    def may_overflow(self) -> bool:
        """Whether a sum possibly overflows and none does certainly."""
        return not self.overflows and POSSIBLE in (self.sum_abs_overflows, self.sum_squares_overflow)


def reduction_reports(totals: Mapping[TensorKey, TensorWindow], format: FloatFormat) -> tuple[ReductionReport, ...]:
    """Return a report on the unscaled values of every tensor that has any finite non-zero value, except updates."""
    return tuple(
        reduction_report(key, window, format)
        for key, window in totals.items()
        if key.kind != UPDATE and window.samples and len(window.histogram.counts)
    )


def reduction_report(key: TensorKey, window: TensorWindow, format: FloatFormat) -> ReductionReport:
    """Return the average sums per sample; if the average overflows, at least one sample does.

    Samples count by the share of their elements that is finite: infinities and NaNs add nothing to the sums.
    """
    histogram = window.histogram
    samples = window.samples * (1 - histogram.nonfinite / histogram.total)
    first = _per_sample(_within_extremes(histogram.sum_abs(), histogram, 1), samples)
    second = _per_sample(_within_extremes(histogram.sum_squares(), histogram, 2), samples)
    return ReductionReport(key, first, second, _verdict(first, format), _verdict(second, format))


def _within_extremes(total: Interval, histogram: ExponentHistogram, power: int) -> Interval:
    """Return the sum of ``|x|`` to the power, bounded also by the sums of as many smallest and as many largest values."""
    least, most = (
        histogram.nonzero * math.prod([extreme] * power) for extreme in (histogram.min_abs, histogram.max_abs)
    )
    low, high = max(total.low, min(least, total.high)), min(total.high, max(most, total.low))
    return Interval(min(max(total.estimate, low), high), low, high)


def _per_sample(total: Interval, samples: float) -> Interval:
    return Interval(total.estimate / samples, total.low / samples, total.high / samples)


def _verdict(value: Interval, format: FloatFormat) -> str:
    if value.low >= format.overflow_edge:
        return CERTAIN
    return POSSIBLE if value.high >= format.overflow_edge else NO


FAULTS = (
    Fault("values-overflow", "warning", _values_overflow, (_Values,)),
    Fault("reductions-overflow", "info", _reductions_overflow, (_Sums,)),
)
