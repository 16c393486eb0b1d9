"""Collects and sorts all findings of a session; also makes the findings on overflowing sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.precision import holds_without_scale
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.analysis.ranks import ranks_named
from mpinspect.ranges.analysis.report import Coverage, LayerReport
from mpinspect.ranges.analysis.scale_advice import Advised
from mpinspect.ranges.faults.diagnose import diagnose, explains_events, explains_forward
from mpinspect.ranges.faults.event_findings import event_findings
from mpinspect.ranges.faults.gradient_findings import MOST_LAYERS_LISTED, gradient_findings
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.rank_findings import ended_early, rank_findings
from mpinspect.ranges.kinds import ACTIVATION, UPDATE, WEIGHT, WEIGHT_GRADIENT, phrase
from mpinspect.ranges.session import Session, TensorInfo, TensorKey, TensorWindow, module_named
from mpinspect.reporting.finding import Finding, gravest_first
from mpinspect.reporting.words import format_name, number_of


def findings(
    session: Session,
    infos: dict[TensorKey, TensorInfo],
    totals: dict[TensorKey, TensorWindow],
    layers: Sequence[LayerReport],
    advised: Advised,
    coverage: Coverage,
    format: FloatFormat,
) -> tuple[Finding, ...]:
    """Return all findings: errors first, then warnings, then information; within one severity, in the order of the checks."""
    case = Case(session, layers, totals, infos, advised, format)
    diagnosed = [_with_ranks(finding, session) for finding in diagnose(case)]
    diagnosed = [_as_consequence(finding, diagnosed) for finding in diagnosed]
    is_explained = any(map(explains_events, diagnosed))
    events = event_findings(session, totals, advised.advice, is_explained=is_explained)
    found = [
        # First of the errors: a process that is gone is what its user sees.
        *ended_early(session),
        *diagnosed,
        *(_as_consequence(finding, diagnosed) for finding in events),
        *(_as_consequence(finding, diagnosed) for finding in gradient_findings(session, layers, advised)),
        *_forward_overflow(session, layers, format),
        *([] if advised.diverged else _reductions(session, totals, format)),
        *_never_fired(session, totals, coverage),
        *rank_findings(session, advised),
    ]
    return tuple(gravest_first(found))


def _with_ranks(finding: Finding, session: Session) -> Finding:
    """Return the finding; if its step became non-finite on only some ranks, with a sentence that names them."""
    began = [event for event in session.events if event.step == finding.step and not event.elsewhere]
    ranks = {event.rank for event in began if event.rank is not None}
    if not 0 < len(ranks) < len(session.ranks):
        return finding
    return replace(finding, message=f"{finding.message} That was on {ranks_named(list(ranks))}.")


def _as_consequence(finding: Finding, diagnosed: Sequence[Finding]) -> Finding:
    """Return the finding, reduced to information without a fix if a diagnosis already explains its cause."""
    if any(_explains(cause, finding) for cause in diagnosed):
        return replace(finding, severity="info", fix="")
    return finding


def _explains(cause: Finding, finding: Finding) -> bool:
    """Return whether a diagnosis is the cause of a finding."""
    if finding.id == "gradients-all-zero":
        return cause.id == "scale-too-low"
    if finding.id == "scale-unknown":
        return cause.id == "scaler-missing-in-float16"
    explains = {"non-finite-event": explains_events, "scale-falls-for-forward": explains_forward}.get(finding.id)
    if explains is None or not explains(cause):
        return False
    return cause.step is not None and finding.step is not None and cause.step <= finding.step


def _forward_overflow(session: Session, layers: Sequence[LayerReport], format: FloatFormat) -> list[Finding]:
    """Return a finding if activations or weights would overflow, which no loss scale can prevent."""
    over = [layer for layer in layers if layer.kind in (ACTIVATION, WEIGHT) and layer.overflowed and layer.histogram]
    if not over:
        return []
    worst = max(over, key=lambda layer: layer.histogram.max_abs if layer.histogram else 0.0)
    largest = worst.histogram.max_abs if worst.histogram else 0.0
    return [
        Finding(
            "values-overflow",
            "info" if holds_without_scale(session, [layer.key for layer in over]) else "warning",
            worst.name,
            f"In {format_name(format.name)} {phrase(worst.name, worst.kind)} would overflow: the largest is {largest:.3g}, "
            f"the format ends at {format.max_finite:g}.",
            {
                "max_abs": largest,
                "overflowed": worst.overflowed,
                "layers": [layer.name for layer in over[:MOST_LAYERS_LISTED]],
                "layers_count": len(over),
            },
            f"Compute {module_named(worst.name)} in FP32 or BF16; a loss scale does not change it.",
        )
    ]


def _reductions(session: Session, totals: dict[TensorKey, TensorWindow], format: FloatFormat) -> list[Finding]:
    reports = reduction_reports(totals, format)
    over = [report for report in reports if report.overflows]
    if not over:
        return []
    least = "at least " if any(report.may_overflow for report in reports) else ""
    # FP32 weights have FP32 gradients under autocast too, and sums of these are FP32.
    in_format = [report for report in over if format.name in totals[report.key].dtypes]
    held = " and ".join(format_name(name) for name in {name: 0 for each in over for name in totals[each.key].dtypes})
    spared = holds_without_scale(session, [report.key for report in over])
    spared = spared or ("" if in_format else f"The run holds {'it' if len(over) == 1 else 'them'} in {held}.")
    largest = max(in_format or over, key=lambda report: report.sum_squares.estimate)
    return [
        Finding(
            "reductions-overflow",
            "info",
            largest.key.name,
            f"Sums over a whole tensor would overflow {format_name(format.name)} in {least}{number_of(len(over), 'tensor')}: "
            f"the sum of squares of {phrase(*largest.key)} averages about {largest.sum_squares.estimate:.1g} (estimated)."
            + (f" {spared}" if spared else ""),
            {
                "sum_abs": largest.sum_abs.estimate,
                "sum_squares": largest.sum_squares.estimate,
                "tensors": {
                    f"{report.key.name} ({report.key.kind})": [report.sum_abs_overflows, report.sum_squares_overflow]
                    for report in over[:MOST_LAYERS_LISTED]
                },
                "tensors_count": len(over),
            },
            ""
            if spared
            else "Compute such sums (norms, means, variances, losses) in FP32, where the script does not already.",
        )
    ]


def _never_fired(session: Session, totals: Mapping[TensorKey, TensorWindow], coverage: Coverage) -> list[Finding]:
    """Return a finding on trainable parameters without any gradient, in a run that trained others and whose optimizer is unknown.

    The diagnosis "gradients-missing" reports those that a known optimizer holds. Modules that were not called and activations
    without gradients are no fault: coverage lists them.
    """
    is_trained = any(key.kind == WEIGHT_GRADIENT and window.samples for key, window in totals.items())
    never = coverage.never_fired
    names = [name for name, kind, why in never if (kind, why) == (WEIGHT_GRADIENT, NO_GRADIENT_SEEN)]
    if not names or not is_trained or session.precision.optimizers:
        return []
    those = repr(names[0]) if len(names) == 1 else f"{len(names)} parameters, such as {names[0]!r},"
    return [
        Finding(
            "never-fired",
            "info",
            names[0],
            f"{those} {'needs' if len(names) == 1 else 'need'} a gradient and never got one in a sampled step, while other "
            "parameters did. No optimizer was seen, so whether they are meant to be trained is not known.",
            {"names": names[:MOST_LAYERS_LISTED], "count": len(names)},
        )
    ]


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
    """Return the sum of ``|x|`` to the power, bounded by that of as many smallest and as many largest values as well."""
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
