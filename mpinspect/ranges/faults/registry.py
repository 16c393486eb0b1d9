"""The registry of faults, in the order of their findings within one severity.

A new fault needs a file in ``name/`` and its line here. Ids, order and the findings that it explains follow from that entry.
"""

from __future__ import annotations

from mpinspect.ranges.analysis.first_line import gravest
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.name import (
    arithmetic,
    coarse,
    culprit_inputs,
    decisions,
    dtypes,
    events,
    gradient_ranges,
    gradients_lost,
    infinities,
    lost_values,
    narrow,
    prepared,
    ranks,
    refused,
    replaced,
    scaler_missing,
    scaling,
    stores,
    unscaling,
    untrained,
    values,
)
from mpinspect.ranges.faults.name.fault import Fault
from mpinspect.ranges.session import Event
from mpinspect.reporting.finding import Finding

#: Listed before all others, since a lost process matters most.
FIRST: tuple[Fault, ...] = (ranks.RANK_ENDED_EARLY,)
#: Faults that a second computation of a step shows.
OF_SECOND: tuple[Fault, ...] = (*coarse.FAULTS, *infinities.FAULTS, *decisions.FAULTS, *lost_values.FAULTS)
#: Faults of loss scales.
OF_SCALING: tuple[Fault, ...] = (*scaling.FAULTS, *scaler_missing.FAULTS)
#: Faults of what the training loop does between its backwards and its steps.
OF_LOOP: tuple[Fault, ...] = (
    *(gradients_lost.NEVER_UPDATED, gradients_lost.STEPS_STOPPED, *gradients_lost.GONE),
    *replaced.FAULTS,
    *gradients_lost.OF_EARLIER_STEPS,
    *unscaling.FAULTS,
    *dtypes.OF_AUTOCAST,
)
#: Faults that name a cause, roughly in the order of how much they explain.
DIAGNOSES: tuple[Fault, ...] = (
    *prepared.FAULTS,
    *culprit_inputs.FAULTS,
    *OF_SECOND,
    *narrow.FAULTS,
    *OF_LOOP,
    *untrained.WITHOUT_GRADIENT,
    *OF_SCALING,
    *refused.FAULTS,
    *dtypes.FAULTS,
    *arithmetic.FAULTS,
    *stores.FAULTS,
    gradients_lost.STANDS_STILL,
)
#: Observations that a diagnosis may explain.
CONSEQUENCES: tuple[Fault, ...] = (
    *events.FAULTS,
    *gradient_ranges.FAULTS,
    *values.FAULTS,
    untrained.NEVER_FIRED,
    *ranks.FAULTS,
)

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*FIRST, *DIAGNOSES, *CONSEQUENCES)}
#: The ids of all findings on ranges; "diagnosis-failed" takes the place of one whose record can't be read.
FINDING_IDS = tuple(sorted([*FAULTS, "diagnosis-failed"]))
#: The ids of findings that depend on the loss scale; no scale changes a forward or a divergence.
OF_LOSS_SCALE = frozenset(fault.id for fault in (*OF_SCALING, *gradient_ranges.FAULTS)) - {"training-diverged"}

#: The ids of findings that the ranges of the layer itself show, or a column next to them.
_IN_RANGES = OF_LOSS_SCALE.union(
    (fault.id for fault in CONSEQUENCES),
    ("updates-lost", "weights-exploded", "gradients-all-zero", "training-diverged"),
)
_EVENT = "non-finite-event"
#: The ids of findings that are placed in the training loop if they name neither a layer nor a line.
_IN_LOOP = {fault.id for fault in (*OF_LOOP, *refused.FAULTS, *OF_SCALING)}
_LOOP, _OPTIMIZER = "the training loop", "the optimizer"
#: The parts of the training that are to blame, for findings without a layer or a line.
_PARTS = {
    "batch-not-finite": "the batch",
    **dict.fromkeys(("gradients-all-zero", "weights-stand-still"), "all weights"),
    **dict.fromkeys(("epsilon-zero", "moments-cannot-decay", "moments-flushed", "weight-decay-lost"), _OPTIMIZER),
    "masters-overwritten": "the FP32 weights",
    "masters-stale": "the master weights",
    "nothing-converted": "the conversion",
}


def explains(cause: Finding, finding: Finding) -> bool:
    """Return whether a diagnosis is the cause of a finding."""
    fault = FAULTS.get(cause.id)
    return fault is not None and fault.is_cause_of(cause, finding)


def explains_events(finding: Finding) -> bool:
    """Return whether a finding names the reason why steps were not finite, so that an event from its step on follows from it."""
    fault = FAULTS.get(finding.id)
    return fault is not None and _EVENT in fault.explains and fault.is_grave(finding)


def depends_on_scale(finding: Finding, event: Event | None) -> bool:
    """Return whether another loss scale would matter to a finding; ``event`` is the one that broke the run."""
    is_overflow = event is not None and event.phase == "backward" and event.value == "inf"
    return finding.id in OF_LOSS_SCALE or (finding.id == _EVENT and is_overflow)


def shows_in_ranges(finding: Finding) -> bool:
    """Return whether the ranges of a finding's layer show the fault; an operator's or a conversion's lies elsewhere."""
    return finding.id in _IN_RANGES


def part_of(finding: Finding) -> str:
    """Return the part of the program in which a finding lies that names neither a layer nor a line; "" if that is not known.

    Of the training loop and the optimizer that is the line to change, if it is known.
    """
    part = _LOOP if finding.id in _IN_LOOP else _PARTS.get(finding.id, "")
    return str((part in (_LOOP, _OPTIMIZER) and finding.evidence.get("change_at")) or part)


def what_broke(report: RangeReport) -> Event | None:
    """Return the event that broke the run; None if all events were harmless."""
    alarming = any(
        explains_events(finding) or (finding.id == _EVENT and finding.severity != "info") for finding in report.findings
    )
    # If the loss scale makes every step skip, each single skip looks like harmless probing: fall back on the first event.
    return gravest(report.events) or next((event for event in report.events if alarming), None)
