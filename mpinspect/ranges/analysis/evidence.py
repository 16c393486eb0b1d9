"""What of a session speaks for the whole run: each window weighed by the steps it stands for, collapsed scales left out.

The first steps of a run are sampled more densely than the later ones, so that pooled counts speak for its beginning. Shares
that speak for the run are therefore taken from weighed counts; the counts themselves stay what was counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpinspect.ranges.session import Event, Session, Window
from mpinspect.reporting.words import steps_named

#: Windows whose samples stand for numbers of steps within this factor are pooled as they are, and shares stay measured: the
#: last sample of a run stands for the few steps that are left.
ALIKE = 2.0
#: Weights are whole numbers, so that counts stay integers: multiples of 1/8 of the least, within 6%.
_PARTS = 8
#: No window outweighs another by more: 2^40 elements a window then still add up in 64 bits.
_MOST = 10_000

#: At this scale and below FP16 flushes even 1: its flush edge is 2^-25.
COLLAPSED_LOG2_SCALE = -25


@dataclass(frozen=True)
class Evidence:
    """The part of a session that speaks for the run.

    Args:
        session: its windows hold weighed counts (peaks and sampled steps stay); shares follow from them.
        is_weighed: whether weights differ, so that shares over the run are estimates.
        left_out: a sentence on the windows left out; "" where there are none.
    """

    session: Session
    is_weighed: bool = False
    left_out: str = ""


def evidence(session: Session) -> Evidence:
    """Return the windows of a session that tell something of its gradients, each weighed by the steps it stands for."""
    kept, left_out = _without_collapse(session)
    weights = _whole_weights(_strides(kept, session.progress.steps))
    if len(set(weights)) > 1:
        weighed = tuple(window.times(weight) for window, weight in zip(kept, weights, strict=True))
        return Evidence(replace(session, windows=weighed), True, left_out)
    return Evidence(session if len(kept) == len(session.windows) else replace(session, windows=kept), False, left_out)


def _strides(windows: Sequence[Window], steps: int) -> list[float]:
    """For how many steps a sample of each window stands: a window reaches to the next one's first step, the last to the end."""
    ordered = sorted(enumerate(windows), key=lambda pair: pair[1].first_step)
    ends = [window.first_step for _, window in ordered[1:]] + [steps]
    strides, before = [1.0] * len(windows), 1.0
    for (place, window), end in zip(ordered, ends, strict=False):
        strides[place] = max((end - window.first_step) / max(window.sampled_steps, 1), 1.0)
        if window is ordered[-1][1]:
            # What is left behind the last sample does not make it a smaller part of the run.
            strides[place] = max(strides[place], before)
        before = strides[place]
    return strides


def _whole_weights(strides: Sequence[float]) -> list[int]:
    if not strides or max(strides) <= ALIKE * min(strides):
        return [1] * len(strides)
    least = min(strides)
    return [round(_PARTS * min(stride / least, _MOST)) for stride in strides]


def _without_collapse(session: Session) -> tuple[tuple[Window, ...], str]:
    """The windows none of whose steps ran under a collapsed scale, and a sentence on the others.

    A scale has collapsed where FP16 would flush 1 itself, or where it fell below 1 after it was backed off for forwards that
    were not finite, which no scale mends.
    """
    changes = session.progress.scales
    useless = min((event.step for event in session.events if event.skipped and forward_broke(event)), default=math.inf)
    ends = [change.step for change in changes[1:]]
    spans = [
        (change.step, end, change.scale)
        for change, end in zip(changes, [*ends, math.inf], strict=False)
        if change.scale and _has_collapsed(change.scale, after_useless_skips=change.step > useless)
    ]
    kept: list[Window] = []
    dropped: list[Window] = []
    for window in session.windows:
        collapsed = any(start <= window.last_step and window.first_step < end for start, end, _ in spans)
        (dropped if collapsed else kept).append(window)
    if not dropped:
        return session.windows, ""
    first, last = min(window.first_step for window in dropped), max(window.last_step for window in dropped)
    least = math.frexp(min(scale for *_, scale in spans))[1] - 1
    named = steps_named(first, last)
    return (
        tuple(kept),
        f"What was counted in {named} is left out: the loss scale had collapsed there, to 2^{least} at the lowest.",
    )


def forward_broke(event: Event) -> bool:
    """Return whether the step's forward was not finite already, so that its gradients say nothing about the scale."""
    return event.phase == "forward" or event.forward_finite is False


def _has_collapsed(scale: float, *, after_useless_skips: bool) -> bool:
    return scale <= 2.0**COLLAPSED_LOG2_SCALE or (scale < 1 and after_useless_skips)
