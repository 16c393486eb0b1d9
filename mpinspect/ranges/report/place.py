"""Names the cause of the trouble and its place, in one form: the module, the line of the script and the operator."""

from __future__ import annotations

import re
from typing import NamedTuple

from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.name.operators import operator_named
from mpinspect.ranges.faults.registry import FAULTS, explains_events, part_of, what_broke
from mpinspect.ranges.records import BEFORE_STEPS
from mpinspect.ranges.session import Event, module_named
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import filled, upper_first

#: The ids of findings on many layers, which name the worst.
_EVENT = "non-finite-event"
_OF_WORST = frozenset(
    {"updates-lost", "gradients-flushed", "gradients-already-flushed", "scale-too-low", "scale-unknown"}
)


class Began(NamedTuple):
    """Where and when the trouble began.

    Args:
        headline: the gravest finding's cause and place, and its step unless it is that of the event; "" without such a finding.
        alarm: the event that broke the run without its place, if the headline has that place; else "".
    """

    headline: str = ""
    alarm: str = ""


def is_of(finding: Finding, event: Event) -> bool:
    """Return whether a finding is about the step of an event, or about none."""
    return finding.step in (None, event.step)


def line_of(finding: Finding) -> str:
    """Return the file and the line of the script that a finding names; "" if it names none."""
    return str(finding.evidence.get("line") or "")


def _origin_of(finding: Finding) -> str:
    """Return the line and the operator from which a finding's error comes: "train.py:12: softmax"; "" if it names none."""
    line, operator = (str(finding.evidence.get(f"origin_{name}") or "") for name in ("line", "operator"))
    return filled("{}", line and f"{line}: {operator_named(operator)}")


def code_of(finding: Finding) -> str:
    """Return the line of the script and the operator that a finding names: "train.py:19: mul"; "" if it names neither."""
    return ": ".join(filter(None, (line_of(finding), _operator(finding))))


def _operator(finding: Finding) -> str:
    operator, _, _ = str(finding.evidence.get("operator") or "").partition(", where")
    return operator_named(operator)


def phase_of(finding: Finding) -> str:
    """Return the phase of the module that a finding names, "forward" or "backward"; "" if it names neither."""
    phase = finding.evidence.get("phase")
    return str(phase) if finding.layer and phase in ("forward", "backward") else ""


def began(report: RangeReport) -> Began:
    """Return where and when the gravest finding began, or else the event that broke the run."""
    finding, event = next((each for each in report.findings if each.is_alarm), None), what_broke(report)
    if finding is None and event is None:
        return Began()
    cause = in_words(_EVENT) if finding is None else _cause(finding)
    if event is not None and cause == in_words(_EVENT) and event.phase in ("forward", "backward"):
        cause = f"{upper_first(event.phase)} not finite"
    name = report.session.with_classes
    if event is not None and (finding is None or _is_cause(finding, event)):
        place, is_own = _of_event(event, finding)
        if is_own:
            return Began(name(f"{cause}: in {place}"), first_line(event, is_beside_map=True))
        return Began(name(f"{cause}: in {place}, first in step {event.step:,}"))
    assert finding is not None
    is_before = finding.evidence.get("phase") == BEFORE_STEPS
    when = filled("first in step {:,}", finding.step) or BEFORE_STEPS * is_before or "throughout the run"
    return Began(f"{cause}: {', '.join(filter(None, (name(_place(finding)), when)))}")


def _cause(finding: Finding) -> str:
    """Return the id of a finding as words, with its operator's name in place of the word: "Overflow in mul"."""
    operator, words = _operator(finding), heading(finding)
    named = re.sub(r"\boperator\b", lambda _: operator, words, flags=re.IGNORECASE) if operator else words
    return upper_first(named) if named.startswith("a ") else named


def heading(finding: Finding) -> str:
    """Return a finding's fault in a few words."""
    fault = FAULTS.get(finding.id)
    return (fault and fault.heading) or in_words(finding.id)


def in_words(id: str) -> str:
    """Return the id of a finding as words: "Mask hides whole row", "Scale too low"."""
    words = upper_first(id.replace("-", " ").replace("non finite", "non-finite"))
    return re.sub(
        r"\b(b?f)(?:loat|p)(\d+)", lambda found: f"{found[1].upper()}{'P' * (found[1] == 'f')}{found[2]}", words
    )


def _is_cause(finding: Finding, event: Event) -> bool:
    """Return whether a finding is the cause of an event, or about the event itself."""
    return is_of(finding, event) and (finding.step is not None or explains_events(finding))


def _of_event(event: Event, finding: Finding | None) -> tuple[str, bool]:
    """Return the place of the cause of an event, and whether it is the event's own."""
    if finding is None:
        return event.place, True
    is_own, part = finding.layer in ("", event.module), "" if finding.layer else part_of(finding)
    if _operator(finding) and not part:
        return ", ".join((event.place if is_own else module_named(finding.layer), _code_beside(finding))), is_own
    if line_of(finding) and not (is_own and finding.layer):
        return line_of(finding), False
    if part and explains_events(finding):
        return part, event.given
    return ", ".join(filter(None, (event.place, (line_of(finding) or _line_of_loop(finding)) * is_own))), True


def _code_beside(finding: Finding) -> str:
    """Return the line and the operator beside the finding's cause, without what the cause has said."""
    line = line_of(finding)
    code = line if line and _cause(finding) != heading(finding) else code_of(finding)
    return ", taken by ".join(filter(None, (_origin_of(finding), code)))


def _place(finding: Finding) -> str:
    """Return a finding's place, after a preposition. A forward is not named: most operators run there."""
    phase = filled("the {} of ", phase_of(finding).replace("forward", ""))
    preposition = "worst in" if finding.id in _OF_WORST and finding.layer else "in"
    module = finding.layer and f"{phase}{module_named(finding.layer)}"
    line = _code_beside(finding) or _line_of_loop(finding)
    return filled(f"{preposition} {{}}", ", ".join(filter(None, (module, line))) or part_of(finding))


def _line_of_loop(finding: Finding) -> str:
    """Return the line to change of a fault of the training loop; "" for another fault, and if it is not known."""
    line = str(finding.evidence.get("change_at") or "")
    return line * (line == part_of(finding))
