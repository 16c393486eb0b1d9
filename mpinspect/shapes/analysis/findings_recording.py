"""Findings about the recording itself: it stopped before its end, or there is nothing in it to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpinspect.reporting.finding import Finding
from mpinspect.shapes.analysis.report import ShapeRow
from mpinspect.shapes.analysis.wording import count
from mpinspect.shapes.records import MatmulRecording

_REAL = (
    "record it on the tensors themselves: lint_shapes(..., device='real'), or --real for mpinspect lint (ids and masks that "
    "are not on meta themselves may be enough); if it stops there too, the model does not run with these arguments"
)
_OTHER = "see that the model runs by itself with these arguments, forward and backward"


def recording_findings(recording: MatmulRecording, rows: Sequence[ShapeRow]) -> list[Finding]:
    """At most one, an error: what is not in the recording has not been judged, so no silence means that all is well."""
    if recording.stopped:
        return [_incomplete(recording, rows)]
    if not rows:
        message = "the model ran to its end and no matrix product was recorded: nothing can be said of its shapes"
        fix = "see that the inputs reach the layers that multiply; the notes, if there are any, tell what can't be recorded"
        return [_finding("nothing-recorded", message, rows, fix)]
    if not any(row.flops for row in rows):
        message = (
            f"the {count(len(rows), 'product')} recorded multiply nothing (0 FLOP): no shape can be judged by them"
        )
        return [_finding("nothing-recorded", message, rows, "give inputs without a size of 0")]
    return []


def _incomplete(recording: MatmulRecording, rows: Sequence[ShapeRow]) -> Finding:
    calls = sum(row.calls for row in rows)
    if rows:
        then = f"every figure here is of the {count(calls, 'product')} that ran until then"
    else:
        then = "no matrix product had run until then, so nothing can be said of its shapes"
    fix = _REAL if recording.device == "meta" else _OTHER
    return _finding("recording-incomplete", f"{recording.stopped}; {then}", rows, fix)


def _finding(id: str, message: str, rows: Sequence[ShapeRow], fix: str) -> Finding:
    evidence: dict[str, Any] = {
        "calls": sum(row.calls for row in rows),
        "flops": sum(row.flops * row.calls for row in rows),
    }
    return Finding(id, "error", "", message, evidence, fix)
