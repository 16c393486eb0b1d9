"""Which of the watched tensors were never seen, and why."""

from __future__ import annotations

from mpinspect.ranges.analysis.report import Coverage
from mpinspect.ranges.kinds import ACTIVATION, GRADIENT_KINDS, UPDATE
from mpinspect.ranges.session import Session, TensorInfo, TensorKey, TensorWindow

#: A gradient that did not come, though others did.
NO_GRADIENT_SEEN = "not called, or compiled, or no backward reached it"


def coverage(session: Session, infos: dict[TensorKey, TensorInfo], totals: dict[TensorKey, TensorWindow]) -> Coverage:
    """What was watched and what never fired, with a reason for each."""
    seen = {key for key, window in totals.items() if window.samples}
    unseen = tuple((key.name, key.kind, _reason(info, session, seen)) for key, info in infos.items() if key not in seen)
    return Coverage(len(infos), len(infos) - len(unseen), unseen)


def _reason(info: TensorInfo, session: Session, seen: set[TensorKey]) -> str:
    if info.note:
        return info.note
    progress = session.progress
    if not seen and not progress.steps and not progress.backwards:
        return "no forward ran"
    if not seen and not progress.sampled_steps:
        return "no step was sampled"
    if info.kind in GRADIENT_KINDS:
        if not progress.backwards and not seen:
            return "no backward ran"
        return NO_GRADIENT_SEEN
    if info.kind == ACTIVATION:
        return "its module's forward never ran"
    return "no optimizer step was sampled" if info.kind == UPDATE else "it was never counted"
