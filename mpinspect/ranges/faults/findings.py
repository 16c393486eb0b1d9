"""Collects and sorts all findings of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpinspect.ranges.analysis.ranks import ranks_named
from mpinspect.ranges.faults.name.case import Case
from mpinspect.ranges.faults.name.fault import Fault
from mpinspect.ranges.faults.registry import CONSEQUENCES, DIAGNOSES, FIRST, explains, explains_events
from mpinspect.ranges.session import Session
from mpinspect.reporting.finding import Finding, gravest_first

#: A loss of a smaller share of the updates, or of a micro-batch's gradients, does less harm than any other diagnosis.
_MOST = 0.5


def findings(case: Case) -> tuple[Finding, ...]:
    """Return all findings: errors first, then warnings, then information; within one severity, in the registry's order."""
    diagnosed = [_with_ranks(finding, case.session) for finding in _made(DIAGNOSES, case)]
    diagnosed.sort(key=_does_less)
    case = replace(case, is_explained=any(map(explains_events, diagnosed)))
    found = [*diagnosed, *_made(CONSEQUENCES, case)]
    found = [_as_consequence(finding, diagnosed) for finding in found]
    found = gravest_first([*_made(FIRST, case), *found])
    name = case.session.with_classes
    return tuple(replace(each, message=name(each.message), fix=name(each.fix)) for each in found)


def _does_less(finding: Finding) -> tuple[bool, bool]:
    """Return a sort key: findings with a small loss last; among equals the backward's, which uses the forward's results, last."""
    evidence = finding.evidence
    return evidence.get("lost_fraction", 1.0) < _MOST, evidence.get("phase") == "backward"


def _made(faults: Sequence[Fault], case: Case) -> list[Finding]:
    """Return the findings of these faults; if a rule can't read its record, a finding that its answer is unknown."""
    found: list[Finding] = []
    for fault in faults:
        try:
            found += fault.findings(case)
        except (ArithmeticError, LookupError, ValueError) as error:
            # A damaged record, or a record of another version, may lack a figure.
            found.append(_failed(fault, error))
    return found


def _failed(fault: Fault, error: Exception) -> Finding:
    return Finding(
        "diagnosis-failed",
        "info",
        "",
        f"Whether this run has the fault {fault.id!r} is not known: its record can't be read ({error!r}). The file may be "
        "damaged or of another version.",
        {"diagnosis": fault.id, "error": repr(error)},
    )


def _with_ranks(finding: Finding, session: Session) -> Finding:
    """Return the finding; if its step became non-finite on only some ranks, with a sentence that names them."""
    began = [event for event in session.events if event.step == finding.step and not event.elsewhere]
    ranks = {event.rank for event in began if event.rank is not None}
    if not 0 < len(ranks) < len(session.ranks):
        return finding
    return replace(finding, message=f"{finding.message} That was on {ranks_named(list(ranks))}.")


def _as_consequence(finding: Finding, diagnosed: Sequence[Finding]) -> Finding:
    """Return the finding, reduced to information without a fix if a diagnosis already explains its cause."""
    if any(explains(cause, finding) for cause in diagnosed):
        return replace(finding, severity="info", fix="", code="")
    return finding
