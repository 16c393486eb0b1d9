"""The advice on the loss scale in one line."""

from __future__ import annotations

from mpinspect.analysis.report import LossScaleAdvice
from mpinspect.reports.table import power_of_two


def scale_line(advice: LossScaleAdvice) -> str:
    """The scale, its window and the headroom; that there is none where none can be suggested."""
    if not advice.available:
        return "No loss scale can be suggested"
    window = f"window {power_of_two(advice.lowest)} .. {power_of_two(advice.highest)}"
    if advice.lowest is not None and advice.highest is not None and advice.lowest > advice.highest:
        window = (
            f"no scale serves all: {power_of_two(advice.lowest)} is needed, {power_of_two(advice.highest)} the largest"
        )
    if advice.needed is False:
        return f"Scale 1 will do; {window}"
    doubt = "" if advice.needed else " (if one is needed: not known)"
    return f"Suggested loss scale: {power_of_two(advice.recommended)}{doubt}; {window}; {_headroom(advice)}"


def _headroom(advice: LossScaleAdvice) -> str:
    spare = advice.headroom
    return "headroom ?" if spare is None else f"headroom {spare} {'power' if spare == 1 else 'powers'} of two"
