"""Diagnoses: findings that name a cause, each with its evidence, the fix as code, and how sure it is.

A diagnosis is one pure function over the record of a run. It yields no finding unless the record shows the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpinspect.ranges.analysis.first_line import gravest
from mpinspect.ranges.faults.name import arithmetic, culprit_inputs, handed_over, scaling, stores
from mpinspect.ranges.faults.name.case import Case, Diagnosis
from mpinspect.ranges.session import Event
from mpinspect.reporting.finding import Finding

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport

#: The order of findings of one severity: those that explain most come first.
DIAGNOSES: tuple[Diagnosis, ...] = (
    *culprit_inputs.DIAGNOSES,
    *handed_over.DIAGNOSES,
    *scaling.DIAGNOSES,
    *arithmetic.DIAGNOSES,
    *stores.DIAGNOSES,
)


#: Share of the updates, or of a micro-batch's gradients, whose loss does more harm than a moment that cannot decay.
_MOST = 0.5

#: Diagnoses that explain a non-finite forward or loss if they are errors; as warnings they describe faults that did no harm.
_OF_FORWARD = frozenset(
    {
        "argument-out-of-range",
        "batch-not-finite",
        "loss-in-16-bits",
        "mask-hides-whole-row",
        "weights-exploded",
        "zero-row-normalized",
    }
)
#: Those that explain non-finite steps of any kind.
_CAUSES = _OF_FORWARD | {
    "epsilon-zero",
    "gradients-clipped-to-zero",
    "scale-falls-for-forward",
    "scale-too-high",
    "scaler-made-anew",
}


def explains_forward(finding: Finding) -> bool:
    """Return whether a finding says why a forward or a loss was not finite."""
    return finding.id in _OF_FORWARD and finding.severity == "error"


def explains_events(finding: Finding) -> bool:
    """Return whether a finding says why steps were not finite, so that an event from its step on is a consequence."""
    # Recurring overflows are warnings because a scaler skips these steps.
    return finding.id == "overflow-recurs" or (finding.id in _CAUSES and finding.severity == "error")


def what_broke(report: RangeReport) -> Event | None:
    """Return the event that broke the run; None if no event did harm."""
    alarming = any(
        explains_events(finding) or (finding.id == "non-finite-event" and finding.severity != "info")
        for finding in report.findings
    )
    # If the loss scale makes every step skip, each single skip looks like harmless probing: fall back on the first event.
    return gravest(report.events) or (report.events[0] if alarming and report.events else None)


def diagnose(case: Case) -> list[Finding]:
    """Return the findings of all diagnoses; what rounding loses in a smaller part comes last, as other faults do more harm."""
    return sorted(_found(case), key=lambda finding: finding.evidence.get("lost_fraction", 1.0) < _MOST)


def _found(case: Case) -> Iterator[Finding]:
    for diagnosis in DIAGNOSES:
        try:
            yield from diagnosis(case)
        except (ArithmeticError, LookupError, ValueError) as error:
            # A damaged record, or one that another version wrote, may lack a figure.
            name = getattr(diagnosis, "__name__", "").replace("_", " ")
            yield Finding(
                "diagnosis-failed",
                "info",
                "",
                f"Whether this run has the fault {name!r} is not known: its record can't be read ({error!r}). The "
                "file may be damaged or of another version.",
                {"diagnosis": name, "error": repr(error)},
            )
