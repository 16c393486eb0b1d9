"""The share that delayed scaling would have clipped: its FP8 scale follows from the largest magnitude of earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp
from typing import NamedTuple

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT8_E5M2
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.ranges.windows.window import Window

#: The lengths of histories judged, in steps: TransformerEngine's default, a short one, and the last step alone.
HISTORIES = (1024, 16, 1)


@dataclass(frozen=True)
class StaleScale:
    """The clipping of a layer's output gradient by scales from the largest magnitude of the last ``history`` steps.

    Args:
        module: dotted path.
        history: number of steps.
        judged: number of windows of counts with a window before them; a window is one sampled step, until a run is long.
        clipped: number of them in which a value certainly exceeded the scale's maximum.
        possible: number of others in which one may have: steps in the history were not sampled, or share a window.
        factor: the largest certain excess, the largest magnitude over that of its history; 1 if none is certain.
        share: least and greatest share of the non-zero elements clipped in that window, 0..1.
    """

    module: str
    history: int
    judged: int
    clipped: int = 0
    possible: int = 0
    factor: float = 1.0
    share: tuple[float, float] = (0.0, 0.0)


def stale_scales(session: Session, history: int) -> tuple[StaleScale, ...]:
    """Return the clipping of each layer's output gradients by a history; an empty tuple without such counts.

    Raises:
        ValueError: history < 1.
    """
    if history < 1:
        raise ValueError(f"a history of {history} steps has no maximum: give 1 or more")
    return tuple(_judged(key.name, history, _maxima(session, key)) for key in _gradients(session))


def unserved_at_scale_one(session: Session) -> tuple[str, ...]:
    """Return the layers whose output gradients lose over 1% of the L1 mass to E5M2's flushing, or are clipped, at scale 1.

    An empty history has this scale: in the first step, and after a resume without the scales' state.
    """
    totals = session.totals()
    return tuple(key.name for key in _gradients(session) if _is_lost(totals[key].histogram))


def _is_lost(histogram: ExponentHistogram) -> bool:
    lost = histogram.lost_l1_share(FLOAT8_E5M2).estimate
    return lost > LOST_L1_TOLERANCE or histogram.overflowed_bounds(FLOAT8_E5M2)[1] > 0


def _gradients(session: Session) -> list[TensorKey]:
    """Return the output gradients that were counted, of layers whose products were measured if any were."""
    measured = {record.module for record in session.precision.operands}
    found = (key for key in session.totals() if key.kind == ACTIVATION_GRADIENT)
    return [key for key in found if not measured or key.name in measured]


class _Counted(NamedTuple):
    """A window's histogram of one tensor.

    ``since``: the first step from which on every step up to the window's last was sampled; None if the window has gaps.
    """

    window: Window
    histogram: ExponentHistogram
    largest: float
    since: int | None


def _maxima(session: Session, key: TensorKey) -> list[_Counted]:
    found: list[_Counted] = []
    for window in session.windows:
        if key not in window.tensors or not (histogram := window.tensors[key].histogram).nonzero:
            continue
        since = None
        if window.sampled_steps == window.last_step - window.first_step + 1:
            since = window.first_step
            if found and found[-1].since is not None and found[-1].window.last_step == window.first_step - 1:
                since = found[-1].since
        found.append(_Counted(window, histogram, histogram.max_abs, since))
    return found


def _judged(module: str, history: int, counted: Sequence[_Counted]) -> StaleScale:
    clipped = possible = 0
    factor, share = 1.0, (0.0, 0.0)
    for place in range(1, len(counted)):
        one = counted[place]
        before = _largest_before(counted, place, history)
        if before is None:
            continue
        if one.largest > before > 0 and one.since is not None and one.since <= max(one.window.first_step - history, 0):
            clipped += 1
            if one.largest / before > factor:
                factor, share = one.largest / before, _share_above(one.histogram, before)
        else:
            possible += 1
    return StaleScale(module, history, max(len(counted) - 1, 0), clipped, possible, factor, share)


def _largest_before(counted: Sequence[_Counted], place: int, history: int) -> float | None:
    """Return the largest magnitude in the histories of a window's steps; 0 if no step has a history.

    None if each history has a magnitude at least as large as the window's, so that nothing was clipped.
    """
    window, _, largest, _ = counted[place]
    before = 0.0
    for each in reversed(counted[:place]):
        if each.window.last_step < window.first_step - history:
            break
        if each.largest >= largest and each.window.first_step >= window.last_step - history:
            return None
        before = max(before, each.largest)
    return before


def _share_above(histogram: ExponentHistogram, edge: float) -> tuple[float, float]:
    """Return bounds on the share of the non-zero elements above a magnitude, which lies below the largest."""
    start = frexp(edge)[1] - 1 - histogram.min_exponent
    certain, most = int(histogram.counts[max(start + 1, 0) :].sum()), int(histogram.counts[max(start, 0) :].sum())
    # The largest element is above it.
    return max(certain, 1) / histogram.nonzero, most / histogram.nonzero
