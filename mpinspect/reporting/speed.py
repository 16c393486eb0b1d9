"""Makes the front of a page on speed: bars of time or work, and on their right the costliest finding with its change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from mpinspect.reporting.document import Block, Code, Document, Front, Line, Listed, Tab, Tone, nonempty
from mpinspect.reporting.finding import SEVERITIES, Finding, in_counts
from mpinspect.reporting.words import filled, upper_first


def front(
    name: str,
    facts: Sequence[str],
    findings: Sequence[Finding],
    tab: Tab,
    *,
    headline: str = "",
    unasked: str = "",
    notes: tuple[str, ...] = (),
    place: Callable[[Finding], str] = lambda finding: "",
) -> Front:
    """Return the front of a page that a tab fills.

    Args:
        name: for the bar.
        facts: for the bar.
        findings: all findings, the gravest first, within a severity the costliest.
        tab: the bars.
        headline: the share that counts.
        unasked: a sentence for a report without a finding that asks for a change.
        notes: sentences below the findings.
        place: returns the share of the time of a finding in words, "" to name its layer.
    """
    state, tone = state_of(findings)
    verdict = (*change(findings), *nonempty(Line(unasked if tone == "good" else "")))
    listed = tuple(Listed(finding, place=place(finding)) for finding in findings)
    tabs = (tab,) if tab.document.blocks else ()
    return Front(name, state, tone, tuple(facts), verdict, listed, notes, tabs=tabs, headline=headline)


def state_of(findings: Sequence[Finding]) -> tuple[str, Tone]:
    """Return the state in a word or two, and its tone."""
    gravest = max((SEVERITIES.index(finding.severity) for finding in findings), default=0)
    tones: tuple[Tone, ...] = ("good", "warning", "error")
    return upper_first(SEVERITIES[gravest]) if gravest else "No loss of speed found", tones[gravest]


def change(findings: Sequence[Finding]) -> Iterator[Block]:
    """Yield the first finding that asks for a change, and the change."""
    for found in islice((finding for finding in findings if finding.is_alarm), 1):
        yield from nonempty(Line(filled("Change: {}", found.fix), "lead"), Code(found.code), Line(found.message))


def as_tab(title: str, document: Document, findings: Sequence[Finding]) -> Tab:
    """Return a document as a tab of a larger page: the sections that its own front shows as bars, then all others."""
    shown = [block for tab in (document.front.tabs if document.front else ()) for block in tab.document.blocks]
    rest = (block for block in document.blocks if block not in shown)
    return Tab(title, replace(document, blocks=(*shown, *rest), front=None), alarms(findings))


def alarms(findings: Sequence[Finding]) -> str:
    """Return the number of findings that ask for a change: "1 warning"; "" without any."""
    return in_counts(finding for finding in findings if finding.is_alarm)
