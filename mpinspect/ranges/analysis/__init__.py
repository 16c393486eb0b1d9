"""Analysis: from a session, which is plain counts, to everything that can be said about it. Pure; no torch, no GPU."""

from __future__ import annotations

from dataclasses import replace

from mpinspect.numeric.formats import FLOAT16, FormatLike, as_format
from mpinspect.ranges.analysis.evidence import evidence
from mpinspect.ranges.analysis.findings import findings
from mpinspect.ranges.analysis.formats_fit import format_verdicts
from mpinspect.ranges.analysis.loss_scale import advise, noise_of, recommend_loss_scale
from mpinspect.ranges.analysis.noise import rounding_noise_ceilings
from mpinspect.ranges.analysis.ranges import (
    coverage,
    layer_reports,
    over_the_run,
    overall_reports,
    tensor_infos,
    with_needs,
)
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.analysis.scale_advice import ScaleRules
from mpinspect.ranges.session import Session

__all__ = ["analyse", "recommend_loss_scale"]


def analyse(session: Session, format: FormatLike = FLOAT16) -> RangeReport:
    """What a session tells about the ranges of its tensors in ``format``, and which loss scale fits.

    Every session has a report: an empty one, one that still grows, one full of NaN.

    Raises:
        ValueError: ``format`` names none that is known.
    """
    format = as_format(format)
    session = replace(session, progress=session.reached())
    totals = session.totals()
    infos = tensor_infos(session, totals)
    seen = evidence(session)
    spoken = totals if seen.session is session else seen.session.totals()
    ceilings = rounding_noise_ceilings(infos, spoken)
    noise = noise_of(spoken, ceilings)
    layers = layer_reports(session, totals, format, noise)
    if spoken is not totals:
        layers = over_the_run(layers, seen, spoken, format)
    advised = advise(seen, spoken, ceilings, noise, ScaleRules(format))
    layers = with_needs(layers, advised.decision)
    covered = coverage(session, infos, totals)
    return RangeReport(
        session=session,
        format=format.name,
        layers=layers,
        findings=findings(session, infos, totals, layers, advised, covered, format),
        events=session.events,
        coverage=covered,
        loss_scale=advised.advice,
        formats=format_verdicts(spoken, noise),
        overall=overall_reports(totals, format),
    )
