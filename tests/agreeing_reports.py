"""Searches a report for sentences that contradict each other: on the loss scale, its window, the findings and their fixes."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mpinspect.numeric.formats import FLOAT16, FORMATS, FloatFormat
from mpinspect.ranges import analyse as analysing
from mpinspect.ranges.analysis import loss_scale
from mpinspect.ranges.analysis.report import LossScaleAdvice, RangeReport
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.report.scale_line import scale_line
from mpinspect.ranges.session import Session
from mpinspect.reporting.forms import render

#: A loss scale that a sentence recommends.
_TELLS = re.compile(
    r"(?:[Mm]ultiply the loss by|Take a loss scale of|begin a GradScaler at|GradScaler\(init_scale=)\s*"
    r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.]*\*\*)"
)


def analyse(session: Session, format: FloatFormat = FLOAT16) -> RangeReport:
    """Call ``mpinspect.ranges.analyse.analyse``, and assert that its report is free of contradictions."""
    report = analysing.analyse(session, format)
    found = contradictions(report)
    assert not found, "\n".join(found)
    return report


def recommend_loss_scale(given: Any, **options: Any) -> LossScaleAdvice:
    """Call ``mpinspect.recommend_loss_scale``; given a session, also assert that its report is free of contradictions."""
    if isinstance(given, Session):
        analyse(given)
    return loss_scale.recommend_loss_scale(given, **options)


def contradictions(report: RangeReport) -> list[str]:
    """Return the contradictions between sentences of the report, a line each."""
    return [*_contradictions(report), *_disagreements(report)]


#: A scale in the code of a fix.
_IN_CODE = re.compile(r"init_scale=2\.0\*\*(-?\d+)")
#: Pairs of findings that exclude each other.
_EXCLUSIVE = (
    ("scale-too-high", "scale-too-low"),
    ("scale-too-high", "scale-window-empty"),
    ("scaler-missing-in-float16", "scaler-in-bfloat16"),
    ("scaler-missing-in-float16", "scaler-shared"),
    ("scaler-missing-in-float16", "initial-scale-too-high"),
    ("scaler-missing-in-float16", "unscale-missing"),
    ("gradients-zeroed", "gradients-never-zeroed"),
    ("gradients-zeroed", "gradients-clipped-to-zero"),
    ("batch-not-finite", "weights-exploded"),
    ("batch-not-finite", "mask-hides-whole-row"),
    ("batch-not-finite", "argument-out-of-range"),
)


def _disagreements(report: RangeReport) -> Iterator[str]:
    """Yield contradictions between the verdict and the findings, and between two findings."""
    verdict = report.verdict
    grave = [finding for finding in report.findings if finding.severity != "info"]
    if verdict.healthy is True and grave:
        yield f"healthy, and yet: {grave[0].message}"
    if verdict.healthy is False and not any(grave[0].message in sentence for sentence in verdict.sentences):
        yield f"the verdict is not about the gravest finding: {verdict.sentences}"
    if verdict.healthy is False and (verdict.change, verdict.code) != (grave[0].fix, grave[0].code):
        yield "the verdict's fix is not that of the gravest finding"
    ids = {finding.id for finding in report.findings}
    for one, other in _EXCLUSIVE:
        if {one, other} <= ids:
            yield f"{one} beside {other}"
    scales = {found for finding in report.findings for found in _IN_CODE.findall(finding.code)}
    if len(scales) > 1:
        yield f"several initial scales in the fixes: {sorted(scales)}"
    if verdict.precision.startswith("Computes in BF16") and scales:
        yield f"BF16, and a scale in a fix: {sorted(scales)}"
    said = " ".join(verdict.sentences)
    window = re.search(r"window 2\^(-?\d+) \.\. 2\^(-?\d+)", said)
    told = report.in_float16 or report.loss_scale
    if window and [2.0 ** int(end) for end in window.groups()] != [told.lowest, told.highest]:
        yield f"the verdict's window is {window[0]}, the advice's {told.lowest} .. {told.highest}"
    if ("without a loss scale" in said or "at any loss scale" in said) and told.needed is not False:
        yield "the verdict says that no scale is needed, the advice does not"


def _contradictions(report: RangeReport) -> Iterator[str]:
    advice, page = report.loss_scale, _sentences(report)
    findings = {finding.id: finding for finding in report.findings}
    sentences = [advice.reason, scale_line(advice)]
    sentences += [part for finding in report.findings for part in (finding.message, finding.fix)]
    told = {float(number) for sentence in [*sentences, page] for number in _TELLS.findall(sentence)}
    said = " ".join(sentences)
    needs_one = re.search(r"A loss scale (below 1 )?is needed|very likely needed", said)
    serves = re.search(r"[Ee]very scale from 2\^(-?\d+) to 2\^(-?\d+) serves every gradient seen", said)
    if not advice.available:
        if told or needs_one or serves or "Suggested" in page:
            yield f"no advice, and yet: {told or needs_one or serves or 'Suggested'}"
        return
    assert advice.lowest is not None
    assert advice.highest is not None
    assert advice.recommended is not None
    empty = "scale-window-empty" in findings
    flushed, overflow = findings.get("gradients-flushed"), findings.get("gradients-overflow")
    if advice.needed is False:
        if advice.recommended != 1 or not advice.lowest <= 1 <= advice.highest:
            yield f"no scale is needed, and {advice.recommended} of {advice.lowest} .. {advice.highest} is recommended"
        if needs_one or told or "Suggested" in page:
            yield f"no scale is needed, and yet: {needs_one or told or 'Suggested'}"
        for found in (flushed, overflow, findings.get("scale-window-empty"), findings.get("gradients-already-flushed")):
            if found is not None:
                yield f"no scale is needed, and yet: {found.message}"
    if advice.needed is True:
        if not (needs_one or "At scale 1 the largest gradients overflow" in said):
            yield "a scale is needed, and no sentence says so"
        if "no loss scaling is needed" in said.lower() or "Scale 1 will do" in said:
            yield "a scale is needed, and a sentence says that none is"
        if advice.lowest <= 1 <= advice.highest:
            yield "a scale is needed, and 1 lies in the window"
    if advice.needed is None:
        if "not known" not in said or needs_one or "no loss scaling" in said.lower() or serves:
            yield "whether a scale is needed is not known, and a sentence knows it"
        if flushed or overflow:
            yield "whether a scale is needed is not known, and a finding knows it"
    if (
        serves
        and _in_float32(serves)
        and [2.0 ** int(end) for end in serves.groups()] != [advice.lowest, advice.highest]
    ):
        yield f"two windows: {serves[0]}, and {advice.lowest} .. {advice.highest}"
    if empty and (serves or "Suggested" in page or "Multiply the loss" in said):
        yield "no scale serves every layer, and a sentence suggests one"
    if empty != (advice.lowest > advice.highest):
        yield "the window is empty in the advice or in the findings, not in both"
    if not empty and told - {advice.recommended}:
        yield f"several scales: {sorted(told)}, and {advice.recommended} is recommended"
    if advice.static_scale != advice.recommended:
        yield "a scale that stays fixed is another one than that recommended"
    if not empty and advice.recommended > advice.highest:
        yield "the scale recommended overflows"
    if flushed and not empty and flushed.severity == "warning" and not re.search(_TELLS, flushed.fix):
        yield "a layer flushes, and no scale is given"
    for event in report.events if report.format == "float16" else ():
        overflowed = event.phase == "backward" and event.forward_finite is not False and event.value == "inf"
        if overflowed and event.loss_scale and math.isfinite(event.loss_scale) and advice.highest >= event.loss_scale:
            yield f"the run overflowed at {event.loss_scale}, and the window reaches to {advice.highest}"
    if advice.needed is False and FORMATS[report.format] is FLOAT16:
        for verdict in report.formats:
            if (
                verdict.format == "float16"
                and verdict.kind in GRADIENT_KINDS
                and not verdict.fits
                and not verdict.overflows
            ):
                yield f"no scale is needed, and {verdict.kind}s do not fit FP16 as they are"


def _in_float32(window: re.Match[str]) -> bool:
    """Return whether FP32 holds both ends of the window. The advice clamps other scales; the sentence does not."""
    return all(-126 <= int(end) <= 127 for end in window.groups())


def _sentences(report: RangeReport) -> str:
    """Return the report's text in one line. Tables are left out, since rendering them takes most of the time."""
    page = render(replace(report, layers=(), overall=(), formats=(), events=()), ".txt", width=200)
    return " ".join(page.split())
