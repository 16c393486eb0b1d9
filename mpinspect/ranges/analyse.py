"""Analysis: derives the whole report from a session's plain counts. Pure functions; no torch, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpinspect.numeric.formats import FLOAT16, FLOAT32, FloatFormat, FormatLike, as_format
from mpinspect.ranges.analysis.evidence import evidence
from mpinspect.ranges.analysis.formats_fit import format_verdicts
from mpinspect.ranges.analysis.loss_scale import advise, noise_of, recommend_loss_scale
from mpinspect.ranges.analysis.noise import rounding_noise_ceilings
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.ranges import (
    coverage,
    layer_reports,
    over_the_run,
    overall_reports,
    tensor_infos,
    with_needs,
)
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.analysis.scale_advice import Advised, ScaleRules
from mpinspect.ranges.faults.findings import findings
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.verdict import verdict
from mpinspect.ranges.kinds import GRADIENT_KINDS, KINDS
from mpinspect.ranges.session import Session

__all__ = ["analyse", "recommend_loss_scale"]


def analyse(session: Session, format: FormatLike | None = None) -> RangeReport:
    """Return the report on how a session's tensors fit the range of ``format``, with the recommended loss scale.

    Args:
        session: any session: an empty one, one still being recorded and one full of NaNs get a report too.
        format: the format to judge the tensors against; None for the run's compute format (``precision.run_format``), or for
            FP16 if that is FP32 or unknown.

    Raises:
        ValueError: ``format`` is the name of no known format.
    """
    session = replace(session, progress=session.reached())
    format = judged_in(session) if format is None else as_format(format)
    totals = session.totals()
    infos = tensor_infos(session, totals)
    seen = evidence(session)
    spoken = totals if seen.session is session else seen.session.totals()
    ceilings = rounding_noise_ceilings(infos, spoken)
    noise = noise_of(spoken, ceilings)
    advised = advise(seen, spoken, ceilings, noise, ScaleRules(format))
    if advised.diverged:
        # Compared with exploded gradients, every other gradient looks like noise.
        noise = frozenset()
    layers = layer_reports(session, totals, format, noise)
    if spoken is not totals:
        layers = over_the_run(layers, seen, spoken, format)
    layers = with_needs(layers, advised.decision)
    covered = coverage(session, infos, totals)
    in_float16 = None
    if format != FLOAT16:
        in_float16 = advise(seen, spoken, ceilings, noise, ScaleRules(FLOAT16)).advice
    found = findings(Case(session, layers, totals, infos, advised, format, covered))
    return RangeReport(
        session=session,
        format=format.name,
        layers=layers,
        findings=found,
        events=session.events,
        coverage=covered,
        loss_scale=advised.advice,
        formats=() if advised.diverged else format_verdicts(spoken, noise, _judged_kinds(session, advised)),
        overall=overall_reports(totals, format),
        in_float16=in_float16,
        verdict=verdict(session, found, advised.advice, in_float16),
    )


def _judged_kinds(session: Session, advised: Advised) -> Sequence[str]:
    """Return the kinds with a known range. Gradients are left out if they allow no window, as when every step overflowed."""
    knows_gradients = advised.decision is not None or not session.progress.scale_known
    return [kind for kind in KINDS if knows_gradients or kind not in GRADIENT_KINDS]


def judged_in(session: Session) -> FloatFormat:
    """Return the run's compute format; FP16 if that is FP32 or unknown."""
    format = run_format(session)
    return FLOAT16 if format is None or format == FLOAT32 else format
