"""All findings of a session, the gravest first."""

from __future__ import annotations

from collections.abc import Sequence

from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.event_findings import event_findings
from mpinspect.ranges.analysis.gradient_findings import MOST_LAYERS_LISTED, gradient_findings, runs_in_bfloat16
from mpinspect.ranges.analysis.reductions import reduction_reports
from mpinspect.ranges.analysis.report import Coverage, LayerReport
from mpinspect.ranges.analysis.scale_advice import Advised
from mpinspect.ranges.analysis.updates import update_findings
from mpinspect.ranges.kinds import ACTIVATION, WEIGHT, phrase
from mpinspect.ranges.session import Session, TensorInfo, TensorKey, TensorWindow
from mpinspect.reporting.finding import SEVERITIES, Finding
from mpinspect.reporting.words import format_name, some


def findings(
    session: Session,
    infos: dict[TensorKey, TensorInfo],
    totals: dict[TensorKey, TensorWindow],
    layers: Sequence[LayerReport],
    advised: Advised,
    coverage: Coverage,
    format: FloatFormat,
) -> tuple[Finding, ...]:
    """Everything worth knowing, errors first, then warnings, then information; within one severity in order of finding."""
    found = [
        *event_findings(session, totals, advised.advice),
        *gradient_findings(session, layers, advised),
        *_forward_overflow(session, layers, format),
        *update_findings(infos, totals),
        *_reductions(totals, format),
        *_never_fired(coverage),
    ]
    return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))


def _forward_overflow(session: Session, layers: Sequence[LayerReport], format: FloatFormat) -> list[Finding]:
    """Activations and weights are not multiplied by the loss scale: what overflows there overflows at every scale."""
    over = [layer for layer in layers if layer.kind in (ACTIVATION, WEIGHT) and layer.overflowed and layer.histogram]
    if not over:
        return []
    worst = max(over, key=lambda layer: layer.histogram.max_abs if layer.histogram else 0.0)
    largest = worst.histogram.max_abs if worst.histogram else 0.0
    return [
        Finding(
            "values-overflow",
            "info" if runs_in_bfloat16(session, [layer.key for layer in over]) else "warning",
            worst.name,
            f"In {format_name(format.name)} {phrase(worst.name, worst.kind)} would overflow: the largest is {largest:.3g}, "
            f"the format ends at {format.max_finite:g}.",
            {
                "max_abs": largest,
                "overflowed": worst.overflowed,
                "layers": [layer.name for layer in over[:MOST_LAYERS_LISTED]],
                "layers_count": len(over),
            },
            f"Compute {worst.name or 'the model'!r} in FP32 or BF16; a loss scale does not change it.",
        )
    ]


def _reductions(totals: dict[TensorKey, TensorWindow], format: FloatFormat) -> list[Finding]:
    over = [report for report in reduction_reports(totals, format) if report.overflows]
    if not over:
        return []
    largest = max(over, key=lambda report: report.sum_squares.estimate)
    return [
        Finding(
            "reductions-overflow",
            "info",
            largest.key.name,
            f"Sums over a whole tensor would overflow {format_name(format.name)} in {len(over)} tensors: the sum of squares "
            f"of {phrase(*largest.key)} is about {largest.sum_squares.estimate:.3g}.",
            {
                "sum_abs": largest.sum_abs.estimate,
                "sum_squares": largest.sum_squares.estimate,
                "tensors": {
                    f"{report.key.name} ({report.key.kind})": [report.sum_abs_overflows, report.sum_squares_overflow]
                    for report in over[:MOST_LAYERS_LISTED]
                },
                "tensors_count": len(over),
            },
            "Keep norms, means, variances and losses in FP32 (autocast does).",
        )
    ]


def _never_fired(coverage: Coverage) -> list[Finding]:
    if not coverage.never_fired:
        return []
    names = [name or "(the model itself)" for name, _, _ in coverage.never_fired]
    return [
        Finding(
            "never-fired",
            "info",
            coverage.never_fired[0][0],
            f"{len(names)} of {coverage.watched} watched tensors were never seen: {some(names)}.",
            {
                "never_fired": [list(entry) for entry in coverage.never_fired[:MOST_LAYERS_LISTED]],
                "count": len(names),
            },
        )
    ]
