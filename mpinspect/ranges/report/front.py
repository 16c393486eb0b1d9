"""Makes the front of a page on a run's ranges: the state in a word, facts, the verdict with its change, findings and the map."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from mpinspect.ranges.analysis.report import RangeReport, Verdict
from mpinspect.ranges.faults.registry import DIAGNOSES, FAULTS
from mpinspect.ranges.report.explorer import Mapped, ModuleNotes, picture
from mpinspect.ranges.report.place import began
from mpinspect.ranges.report.scale_line import steps_and_samples
from mpinspect.reporting.document import Block, Code, Front, Line, Listed, Tone, nonempty
from mpinspect.reporting.finding import SEVERITIES
from mpinspect.reporting.words import filled, time_taken

_DOCS = "https://github.com/mpinspect/mpinspect/blob/main/docs/"
#: The pages that explain findings, and the ids on each.
_PAGES = {"diagnoses.md": {diagnosis.id for diagnosis in DIAGNOSES}, "sentences.md": frozenset(FAULTS)}
#: In place of a map.
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z'])")
NO_MAP = "No tensor was counted, so there is no map."
_NO_STATE = "Nothing to judge"


def front(report: RangeReport, name: str, notes: ModuleNotes) -> Front:
    """Return the front of the page on one model, with this name in its bar."""
    state, tone = state_of(report)
    return Front(
        name,
        state,
        tone,
        tuple(facts(report)),
        tuple(verdict_of(report)),
        tuple(listed(report)),
        picture=picture(Mapped("", report, notes)),
        without=NO_MAP,
        headline=began(report).headline,
        alarm=began(report).alarm,
    )


def state_of(report: RangeReport) -> tuple[str, Tone]:
    """Return the verdict in a word or two, and its tone."""
    verdict = report.verdict
    if verdict.healthy is None and verdict.ended:
        return "Ended by an exception", "error"
    if verdict.healthy is None:
        return _NO_STATE, "unknown"
    if verdict.healthy:
        return verdict.opening, "good"
    is_error = any(finding.severity == SEVERITIES[-1] for finding in report.findings)
    return verdict.opening, "error" if is_error else "warning"


def facts(report: RangeReport) -> Iterator[str]:
    """Yield short facts on a run: its steps, start, duration, ranks, devices and versions."""
    info, progress = report.session.info, report.session.progress
    yield steps_and_samples(progress)
    with suppress(ValueError):
        yield f"{datetime.datetime.fromisoformat(info.started):%d %b %Y, %H:%M}"
    if progress.elapsed_s:
        yield time_taken(progress.elapsed_s) + progress.so_far
    if ranks := len(report.session.ranks):
        yield f"{ranks} ranks"
    if info.devices:
        yield info.devices
    yield from (f"{name} {info.versions[name]}" for name in ("torch", "mpinspect") if name in info.versions)


def verdict_of(report: RangeReport) -> Iterator[Block]:
    """Yield a verdict and its change; the change is first if a headline already names the fault and its place.

    The verdict's pointer to the findings is left out, since a front shows them below.
    """
    verdict = report.verdict
    first, following = first_and_next(verdict)
    tone: Tone = "strong" if verdict.healthy is None else state_of(report)[1]
    has_headline = began(report).headline or report.session.ended_by
    reason = nonempty(Line(first, "lead" if has_headline else tone), *map(Line, [following, *verdict.sentences[1:]]))
    yield from nonempty(Line(verdict.ended, "error"))
    change = change_blocks(verdict, code_first=True)
    yield from (*change, *reason) if has_headline else (*reason, *change)
    yield from nonempty(Line(verdict.precision, "dim"))


def first_and_next(verdict: Verdict) -> tuple[str, str]:
    """Return a verdict's headline, and the next thing to do on a healthy run; each "" without one."""
    first = "".join(verdict.sentences[:1])
    if not verdict.healthy:
        return first, ""
    first, *following = _SENTENCE.split(first, maxsplit=1)
    return first, "".join(following)


def change_blocks(verdict: Verdict, where: str = "", *, code_first: bool = False) -> tuple[Block, ...]:
    """Return the change that a verdict asks for, with its code; () if it asks for none.

    Args:
        where: follows the word "Change".
        code_first: whether the code stands below the first sentence, before all others.
    """
    sentences = _SENTENCE.split(verdict.change, maxsplit=1) if code_first else [verdict.change]
    first, *more = sentences
    return nonempty(Line(first and f"Change{where}: {first}", "lead"), Code(verdict.code), *map(Line, more))


def merged(found: Iterable[Listed]) -> Iterator[Listed]:
    """Yield findings once that several things share, with the names of all of them."""
    alike: dict[tuple[object, ...], list[Listed]] = {}
    for each in found:
        finding = each.finding
        same = (finding.id, finding.severity, finding.layer, finding.step, finding.message)
        alike.setdefault(same, []).append(each)
    for first, *others in alike.values():
        yield first._replace(others=tuple(each.thing for each in others))


def listed(report: RangeReport, thing: str = "") -> Iterator[Listed]:
    """Yield a report's findings for a front, each with the address of the page that explains it."""
    for finding in report.findings:
        pages = [name for name, ids in _PAGES.items() if finding.id in ids]
        link = "".join(f"{_DOCS}{name}#{finding.id}" for name in pages[:1])
        yield Listed(finding, thing, link, place=report.session.with_classes(filled("'{}'", finding.layer)))
