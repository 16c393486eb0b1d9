"""The budget: which steps are sampled and watched where their cost must stay below a share of the training's own time.

A step earns a little less than that share of its bare time; what the inspector spends is paid from what was earned, afterwards.
So nothing has to be foreseen: whoever is in debt waits until the steps have earned it back, and over a run the cost comes to what
was earned, whatever a step costs and however that changes.
"""

from __future__ import annotations

import statistics
from collections import deque
from numbers import Real

#: After so many steps without one a step is sampled (or watched) all the same: a report that hears nothing is worth nothing.
LONGEST_PAUSE = 1000
#: The first steps are sampled whatever they cost, so that there is a report at all; the first one's cost is not charged: things
#: are set up and compiled in it, and nobody saw when it began.
FIRST_STEPS = 2

#: The part of the share that is earned. The rest is for what the meter can't see (a hook's way to its first line, caches that the
#: training finds cold) and for the last look, which no step after it pays.
PLANNED = 0.9
#: The watch's share of what is earned; what it does not need is the samples', and the other way round.
_WATCH_SHARE = 0.8
#: Steps that tell what is usual, and how many times that a step may earn; beyond lies a stall.
_USUAL_OF = 15
_MOST_EARNED = 2.0
#: A look is charged up to so many times the usual, or what so many steps earn, whichever is more; beyond lies a stall too. Short
#: ones, of a busy machine, are charged in full: they come often.
_MOST_CHARGED, _MOST_CHARGED_STEPS = 8.0, 100


def check_max_overhead(max_overhead: object) -> float:
    """Return the share as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not between 0 and 1, both excluded.
    """
    if isinstance(max_overhead, bool) or not isinstance(max_overhead, Real):
        raise TypeError(f"max_overhead={max_overhead!r}: give a number, 0.02 for 2% of the training's own time")
    share = float(max_overhead)
    if not 0 < share < 1:
        raise ValueError(f"max_overhead={max_overhead!r}: give a share between 0 and 1, 0.02 for 2%")
    return share


class Budget:
    """Chooses for each step whether it is sampled and whether it is watched.

    Args:
        max_overhead: most that the inspector may spend, over the bare time of the steps: 0..1.
        every: least interval between samples, in steps.
        samples, watches: whether there is anything to sample, and whether there is a watch.
    """

    def __init__(self, max_overhead: float, *, every: int = 1, samples: bool = True, watches: bool = True) -> None:
        #: What a second of bare training earns, in seconds.
        self._earning = PLANNED * check_max_overhead(max_overhead)
        self._every = every
        self._counts, self._looks = samples, watches
        self._watch_share = _WATCH_SHARE if samples and watches else float(watches)
        #: Seconds that may be spent; below zero they were spent already.
        self._for_samples = self._for_watch = 0.0
        self._ended = 0
        self._last_sample = self._last_watch = -LONGEST_PAUSE
        self._bare: deque[float] = deque(maxlen=_USUAL_OF)
        self._usual_bare = 0.0
        self._costs: dict[str, deque[float]] = {}
        self._decide()

    @property
    def samples(self) -> bool:
        """Whether the current step is sampled."""
        return self._samples

    @property
    def watches(self) -> bool:
        """Whether the current step is watched, as every sampled one is."""
        return self._watches

    def end_step(self, step_s: float | None, own_s: float) -> float:
        """End the current step and choose the next.

        Args:
            step_s: how long it took, the inspector's own time included; None where its beginning was not seen.
            own_s: what the inspector spent meanwhile.

        Returns:
            seconds of bare training that it counts for: its own, and no more than twice the usual.
        """
        bare = 0.0
        if step_s is not None:
            bare = self._usual_part(max(step_s - own_s, 0.0))
            self._charge(own_s)
            self._earn(self._earning * bare)
        if self._samples:
            self._last_sample = self._ended
        if self._watches:
            self._last_watch = self._ended
        self._ended += 1
        self._decide()
        return bare

    def charge_later(self, own_s: float) -> None:
        """Charge seconds that a device spent in a step before this one, known only now."""
        self._spend(own_s, self._watch_share)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._samples = self._counts and self._is_due(self._for_samples, self._last_sample, self._every)
        self._watches = self._looks and (self._samples or self._is_due(self._for_watch, self._last_watch, 1))

    def _is_due(self, credit: float, last: int, least: int) -> bool:
        pause = self._ended - last
        if pause < least:
            return False
        return self._ended < FIRST_STEPS or credit >= 0 or pause >= max(LONGEST_PAUSE, least)

    def _usual_part(self, bare: float) -> float:
        self._bare.append(bare)
        self._usual_bare = statistics.median(self._bare)
        return min(bare, _MOST_EARNED * self._usual_bare)

    def _earn(self, seconds: float) -> None:
        """Add what a step earns. No more is saved up than that: many samples in a row would be felt."""
        watch = self._for_watch + self._watch_share * seconds
        most = self._watch_share * seconds
        samples = self._for_samples + (1 - self._watch_share) * seconds + max(watch - most, 0.0)
        watch = min(watch, most)
        if self._looks and samples > seconds:
            watch = min(watch + samples - seconds, most)
        self._for_watch, self._for_samples = watch, min(samples, seconds)

    def _charge(self, own_s: float) -> None:
        kind = "sampled" if self._samples else "watched" if self._watches else "idle"
        known = self._costs.setdefault(kind, deque(maxlen=_USUAL_OF))
        known.append(own_s)
        if own_s > self._earned_in(_MOST_CHARGED_STEPS) and len(known) > 2:
            own_s = min(own_s, max(_MOST_CHARGED * statistics.median(known), self._earned_in(_MOST_CHARGED_STEPS)))
        # What a step costs in which nothing is looked at is borne by both.
        self._spend(own_s, {"sampled": 0.0, "watched": 1.0}.get(kind, self._watch_share))

    def _spend(self, seconds: float, on_watch: float) -> None:
        # Debts beyond what the longest pause earns are forgiven: a look is due then anyway.
        deepest = -self._earned_in(LONGEST_PAUSE)
        self._for_watch = max(self._for_watch - on_watch * seconds, deepest)
        self._for_samples = max(self._for_samples - (1 - on_watch) * seconds, deepest)

    def _earned_in(self, steps: int) -> float:
        """Return what so many usual steps earn."""
        return steps * self._earning * self._usual_bare
