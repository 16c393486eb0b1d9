"""Analysis: from a session, which is plain counts, to everything that can be said about it. Pure; no torch, no GPU."""

from __future__ import annotations

from dataclasses import replace

from mpinspect.analysis.coverage import coverage
from mpinspect.analysis.findings import findings
from mpinspect.analysis.formats_fit import format_verdicts
from mpinspect.analysis.loss_scale import advise, noise_of, recommend_loss_scale
from mpinspect.analysis.noise import rounding_noise_ceilings
from mpinspect.analysis.ranges import layer_reports, overall_reports, tensor_infos
from mpinspect.analysis.report import RangeReport
from mpinspect.analysis.scale_advice import ScaleRules
from mpinspect.formats import FLOAT16, FloatFormat
from mpinspect.session import Session

__all__ = ["analyse", "recommend_loss_scale"]


def analyse(session: Session, format: FloatFormat = FLOAT16) -> RangeReport:
    """What a session tells about the ranges of its tensors in ``format``, and which loss scale fits.

    Every session has a report: an empty one, one that still grows, one full of NaN.
    """
    session = replace(session, progress=session.reached())
    totals = session.totals()
    infos = tensor_infos(session, totals)
    ceilings = rounding_noise_ceilings(infos, totals)
    noise = noise_of(totals, ceilings)
    layers = layer_reports(session, totals, format, noise)
    advice = advise(session, totals, ceilings, noise, ScaleRules(format))
    seen = coverage(session, infos, totals)
    return RangeReport(
        session=session,
        format=format.name,
        layers=layers,
        findings=findings(session, infos, totals, layers, advice, seen, format),
        events=session.events,
        coverage=seen,
        loss_scale=advice,
        formats=format_verdicts(totals, noise),
        overall=overall_reports(totals, format),
    )
