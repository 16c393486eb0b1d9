"""The representative part of a session: windows weighted by the steps they represent, without those at collapsed scales.

The first steps of a run are sampled more densely than later ones, so pooled counts overrepresent its beginning. Shares
over the whole run are therefore computed from weighted counts; the reported counts stay unweighted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpinspect.numeric.formats import floor_log2
from mpinspect.ranges.session import END, TAKEN, Event, Session
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.words import steps_named

#: Windows are pooled unweighted, and shares count as measured, if the steps per sample differ by at most this factor: the
#: last sample of a run represents only the few remaining steps.
ALIKE = 2.0
#: Weights are integers, so that counts stay integers: multiples of 1/8 of the smallest stride, accurate to 6%.
_PARTS = 8
#: Largest ratio of two windows' weights: the counts of windows with 2^40 elements then still fit in 64 bits.
_MOST = 10_000

#: At this scale and below FP16 flushes even 1: its flush edge is 2^-25.
COLLAPSED_LOG2_SCALE = -25


@dataclass(frozen=True)
class Evidence:
    """The part of a session that represents the whole run.

    Args:
        session: the session with weighted counts (peaks and sampled steps unchanged), for computing shares.
        is_weighed: whether the windows' weights differ, which makes shares over the run estimates.
        left_out: a sentence on the windows that were left out, or "".
    """

    session: Session
    is_weighed: bool = False
    left_out: str = ""


def evidence(session: Session) -> Evidence:
    """Return the session without windows at a collapsed loss scale, each window weighted by the steps it represents."""
    kept, left_out = _without_collapse(session)
    weights = _whole_weights(_strides(kept, session.progress.steps))
    if len(set(weights)) > 1:
        weighed = tuple(window.times(weight) for window, weight in zip(kept, weights, strict=True))
        return Evidence(replace(session, windows=weighed), True, left_out)
    if len(kept) < len(session.windows):
        session = replace(session, windows=kept)
    return Evidence(session, False, left_out)


def _strides(windows: Sequence[Window], steps: int) -> list[float]:
    """Return the number of steps per sample of each window; a window ends where the next one begins, or at the run's end."""
    ordered = sorted(enumerate(windows), key=lambda pair: pair[1].first_step)
    ends = [window.first_step for _, window in ordered[1:]] + [steps]
    strides, before = [1.0] * len(windows), 1.0
    for (place, window), end in zip(ordered, ends, strict=False):
        strides[place] = max((end - window.first_step) / max(window.sampled_steps, 1), 1.0)
        if window is ordered[-1][1]:
            # The last window gets at least the previous window's stride, even if few steps follow its last sample.
            strides[place] = max(strides[place], before)
        before = strides[place]
    return strides


def _whole_weights(strides: Sequence[float]) -> list[int]:
    if not strides or max(strides) <= ALIKE * min(strides):
        return [1] * len(strides)
    least = min(strides)
    return [round(_PARTS * min(stride / least, _MOST)) for stride in strides]


def _without_collapse(session: Session) -> tuple[tuple[Window, ...], str]:
    """Return the windows without any step at a collapsed loss scale, and a sentence on the windows left out."""
    spans = _collapsed_spans(session)
    by_collapse: dict[bool, list[Window]] = {True: [], False: []}
    for window in session.windows:
        by_collapse[any(start <= window.last_step and window.first_step < end for start, end, _ in spans)].append(
            window
        )
    dropped = by_collapse[True]
    if not dropped:
        return session.windows, ""
    named = steps_named(min(window.first_step for window in dropped), max(window.last_step for window in dropped))
    least = floor_log2(min(scale for *_, scale in spans))
    left_out = f"The counts of {named} are left out: the loss scale had collapsed there, to 2^{least} at the lowest."
    return tuple(by_collapse[False]), left_out


def _collapsed_spans(session: Session) -> list[tuple[int, int, float]]:
    """Return the first step, the step after the last, and the scale of each span with a collapsed loss scale.

    A loss scale has collapsed if FP16 would flush even 1 at that scale, or if the scale fell below 1 after steps were
    skipped for a non-finite forward, which no loss scale fixes.
    """
    useless = min((event.step for event in session.events if event.skipped and forward_broke(event)), default=math.inf)
    return [
        (start, end, scale)
        for scale, start, end in session.progress.scale_spans()
        if scale and (scale <= 2.0**COLLAPSED_LOG2_SCALE or (scale < 1 and start > useless))
    ]


def own_scale(session: Session) -> tuple[float | None, bool]:
    """Return the loss scale that the run chose, and whether its scale later collapsed.

    That is the last known scale. After a collapse it is the scale from which the last uninterrupted fall began; None
    where no scale is known.
    """
    scales = [change.scale for change in session.progress.scales if change.scale and math.isfinite(change.scale)]
    if not scales:
        return None, False
    own = scales.pop()
    if not any(scale == own for *_, scale in _collapsed_spans(session)):
        return own, False
    while scales and scales[-1] > own:
        own = scales.pop()
    return own, True


def survived(event: Event, session: Session) -> bool:
    """Return whether later forwards stayed finite after an update with non-finite gradients, so that the weights are finite."""
    if event.story != TAKEN or any(each.phase in ("forward", END) or forward_broke(each) for each in session.events):
        return False
    # Forwards of a compiled model are not watched: a backward without an event shows that its weights are finite.
    hidden = session.progress.hides("") and max(each.step for each in session.events) >= session.progress.steps - 1
    watched = session.info.watch and session.progress.watched_steps is None and not hidden
    later = any(each.forward_finite for each in session.events if each.step > event.step)
    return later or (watched and session.progress.steps > event.step + 2)


def forward_broke(event: Event) -> bool:
    """Return whether the step's forward was already non-finite, so that its gradients are not evidence on the loss scale."""
    return event.phase == "forward" or event.forward_finite is False
