"""Weight updates that rounding loses where weights are stored in 16 bits: w + dw rounds back to w."""

from __future__ import annotations

from mpinspect.ranges.kinds import UPDATE, WEIGHT
from mpinspect.ranges.session import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import format_name, percent

#: More than this share lost is worth a warning. Measured on a digits classifier trained by SGD with FP16 weights and no
#: FP32 masters: 87% of the updates were lost, and the loss ended at 0.298 against 0.160.
LOST_UPDATES_TOLERANCE = 0.1

_MASTERS = "Keep FP32 master weights: let the optimizer step in FP32 and copy the rounded weights back."


def update_findings(infos: dict[TensorKey, TensorInfo], totals: dict[TensorKey, TensorWindow]) -> list[Finding]:
    """One finding a storage format: a warning where weights really are stored so and lose too much, else for information."""
    by_format: dict[str, dict[str, LostUpdates]] = {}
    for key, window in totals.items():
        for storage, updates in window.lost_updates.items() if key.kind == UPDATE else ():
            if updates.nonzero:
                by_format.setdefault(storage, {})[key.name] = updates
    findings = []
    for storage, updates_by_name in by_format.items():
        stored = {name: lost for name, lost in updates_by_name.items() if _stored_in(storage, name, lost, infos)}
        suffering = {name: lost for name, lost in stored.items() if lost.fraction > LOST_UPDATES_TOLERANCE}
        if suffering:
            findings.append(_finding("warning", storage, suffering))
        elif any(lost.lost for lost in updates_by_name.values()):
            findings.append(_finding("info", storage, updates_by_name, hypothetical=not stored))
    return findings


def _stored_in(storage: str, name: str, lost: LostUpdates, infos: dict[TensorKey, TensorInfo]) -> bool:
    """Whether the parameter really is held in this format."""
    dtypes = {infos[key].dtype for key in (TensorKey(name, UPDATE), TensorKey(name, WEIGHT)) if key in infos}
    return lost.measured or storage in dtypes


def _finding(severity: str, storage: str, updates: dict[str, LostUpdates], *, hypothetical: bool = False) -> Finding:
    worst = max(updates, key=lambda name: updates[name].fraction)
    lost, nonzero = (sum(getattr(part, field) for part in updates.values()) for field in ("lost", "nonzero"))
    name = format_name(storage)
    if hypothetical:
        message = f"If the weights were stored in {name}, rounding would lose {percent(lost / nonzero)} of the updates"
    else:
        message = f"The weights are stored in {name}, and rounding loses {percent(lost / nonzero)} of the updates"
    return Finding(
        "updates-lost",
        severity,
        worst,
        f"{message}; {percent(updates[worst].fraction)} of those of {worst!r}.",
        {
            "format": storage,
            "lost_fraction": lost / nonzero,
            "worst_lost_fraction": updates[worst].fraction,
            "layers": len(updates),
            "measured": all(part.measured for part in updates.values()),
        },
        _MASTERS,
    )
