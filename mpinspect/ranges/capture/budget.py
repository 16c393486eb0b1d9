"""The budget: chooses which steps are sampled and watched so that the cost stays below a share of the training's own time.

Each step earns a little less than that share of its bare time (its time without the inspector), and the inspector's time is
charged afterwards. No cost has to be predicted: sampling or watching that is in debt pauses until further steps have earned the
debt back, so over a run the cost equals the time earned, however much a step costs and however that changes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from numbers import Real

#: Maximum number of steps between sampled (or watched) steps, at any debt: a report without data is useless.
LONGEST_PAUSE = 1000
#: The first steps are sampled at any cost, so that every run gets a report. The first one includes setup and compilation, and
#: its beginning is not observed, so it is charged the second one's cost.
FIRST_STEPS = 2

#: The earned part of the share. The rest is reserved for costs that can't be measured and for the last sampled or watched step,
#: whose cost no later step earns back.
PLANNED = 0.9
#: The watch's share of the time earned. The watch and the samples pass unneeded time on to each other.
_WATCH_SHARE = 0.8
#: The usual time of a step is the median over this many steps. A step longer than this multiple of it counts as a stall.
_USUAL_OF = 15
#: Minimum and maximum number of steps of either kind for measuring the slowdown outside of the inspector's callbacks.
_FEWEST_COMPARED, _COMPARED = 5, 60
_MOST_EARNED = 2.0
#: Maximum charge for a step: this multiple of the usual cost or the earnings of this many steps, whichever is larger.
#: A higher cost counts as a stall too. Short stalls of a busy machine are charged in full because they are frequent.
_MOST_CHARGED, _MOST_CHARGED_STEPS = 8.0, 100


def check_max_overhead(max_overhead: object) -> float:
    """Return the share as a float; inf means no limit.

    Raises:
        TypeError: the share is not a number.
        ValueError: the share is neither between 0 and 1, both excluded, nor inf.
    """
    if isinstance(max_overhead, bool) or not isinstance(max_overhead, Real):
        raise TypeError(f"max_overhead={max_overhead!r}: give a number, 0.02 for 2% of the training's own time")
    share = float(max_overhead)
    if not 0 < share < 1 and share != math.inf:
        raise ValueError(
            f"max_overhead={max_overhead!r}: give a share between 0 and 1, 0.02 for 2%; math.inf for no limit"
        )
    return share


@dataclass(frozen=True)
class Limit:
    """The cost of the inspection above which a run without a budget gets one.

    Args:
        share: the inspector's time as a share of the bare time of the steps so far, 0..1; also the budget's ``max_overhead``.
        seconds: the time that the inspector may take beyond that share.
    """

    share: float
    seconds: float

    def is_exceeded(self, own_s: float, bare_s: float) -> bool:
        """Return whether the inspector's seconds exceed its limit for these seconds of bare training."""
        return own_s > self.share * bare_s + self.seconds


#: Inspecting a tiny model can take longer than training it. It then gets a budget: half of the training's time plus 20 s.
#: A short run, or the beginning of a long one, is therefore inspected at any cost.
USUAL_LIMIT = Limit(0.5, 20.0)


class Budget:
    """Chooses for each step whether it is sampled and whether it is watched.

    Args:
        max_overhead: the inspector's maximum time as a share of the bare time of the steps: between 0 and 1.
        every: least interval between samples, in steps.
        samples, watches: whether there is anything to sample, and whether there is a watch.
    """

    def __init__(self, max_overhead: float, *, every: int = 1, samples: bool = True, watches: bool = True) -> None:
        #: The seconds that a second of bare training earns.
        self._earning = PLANNED * check_max_overhead(max_overhead)
        self._every = every
        self._has_samples, self._has_watch = samples, watches
        self._watch_share = _WATCH_SHARE if samples and watches else float(watches)
        #: Seconds that may be spent; a negative number is a debt.
        self._for_samples = self._for_watch = 0.0
        self._ended = 0
        #: Whether the first step is still to be charged.
        self._owes_first = False
        self._last_sample = self._last_watch = -LONGEST_PAUSE
        #: Whether the current step is sampled, and whether it is watched; if there is a watch, every sampled step is.
        self.samples = self.watches = False
        self._bare: deque[float] = deque(maxlen=_USUAL_OF)
        #: The metered bare times of steps that were sampled or watched, and of steps that were neither.
        self._beside_work: deque[float] = deque(maxlen=_COMPARED)
        self._idle: deque[float] = deque(maxlen=_COMPARED)
        self._usual_bare = 0.0
        #: The inspector's times, by whether the step was sampled and whether it was watched.
        self._costs: dict[tuple[bool, bool], deque[float]] = {}
        self._decide()

    def end_step(self, step_s: float | None, own_s: float) -> tuple[float, float]:
        """End the current step and choose the next.

        Args:
            step_s: the step's time in seconds, including the inspector's; None if its beginning was not observed.
            own_s: the inspector's own time in that step, in seconds.

        Returns:
            the step's bare training time in seconds, capped at twice the usual, and the inspector's time, including the
            slowdown outside of its callbacks; 0 and ``own_s`` if the step's beginning was not observed.
        """
        bare = 0.0
        is_at_work = self.samples or self.watches
        if step_s is None:
            self._owes_first = is_at_work
        else:
            bare = max(step_s - own_s, 0.0)
            if is_at_work:
                self._beside_work.append(bare)
                hidden = min(self._hidden(), bare, own_s)
                own_s, bare = own_s + hidden, bare - hidden
            else:
                self._idle.append(bare)
            bare = self._usual_part(bare)
            self._charge(own_s)
            if self._owes_first:
                self._charge(own_s)
                self._owes_first = False
            self._earn(self._earning * bare)
        if self.samples:
            self._last_sample = self._ended
        if self.watches:
            self._last_watch = self._ended
        self._ended += 1
        self._decide()
        return bare, own_s

    def charge_later(self, own_s: float) -> None:
        """Charge seconds that a device spent on the inspector in an earlier step and that are known only now."""
        self._spend(own_s, self._watch_share)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self.samples = self._has_samples and self._is_due(self._for_samples, self._last_sample, self._every)
        self.watches = self._has_watch and (self.samples or self._is_due(self._for_watch, self._last_watch, 1))

    def _is_due(self, credit: float, last: int, least: int) -> bool:
        pause = self._ended - last
        if pause < least:
            return False
        return self._ended < FIRST_STEPS or credit >= 0 or pause >= max(LONGEST_PAUSE, least)

    def _hidden(self) -> float:
        """Return the slowdown, in seconds, of sampled or watched steps in excess of the callbacks' time.

        Torch takes time to call a hook, which also evicts torch's code from the caches. With many small layers this is up to
        half of the callbacks' time. The result is 0 within the usual variation of the steps.
        """
        if min(len(self._beside_work), len(self._idle)) < _FEWEST_COMPARED:
            return 0.0
        beside_work, idle = statistics.quantiles(self._beside_work), statistics.quantiles(self._idle)
        # About one standard error of the medians' difference.
        spread = beside_work[2] - beside_work[0] + idle[2] - idle[0]
        doubt = spread / math.sqrt(min(len(self._beside_work), len(self._idle)))
        return max(beside_work[1] - idle[1] - doubt, 0.0)

    def _usual_part(self, bare: float) -> float:
        self._bare.append(bare)
        self._usual_bare = statistics.median(self._bare)
        return min(bare, _MOST_EARNED * self._usual_bare)

    def _earn(self, seconds: float) -> None:
        """Credit a step's earnings. The credit is capped at one step's earnings, to prevent many sampled steps in a row."""
        watch = self._for_watch + self._watch_share * seconds
        most = self._watch_share * seconds
        samples = self._for_samples + (1 - self._watch_share) * seconds + max(watch - most, 0.0)
        watch = min(watch, most)
        if self._has_watch and samples > seconds:
            watch = min(watch + samples - seconds, most)
        self._for_watch, self._for_samples = watch, min(samples, seconds)

    def _charge(self, own_s: float) -> None:
        known = self._costs.setdefault((self.samples, self.watches), deque(maxlen=_USUAL_OF))
        known.append(own_s)
        if own_s > self._earned_in(_MOST_CHARGED_STEPS) and len(known) > 2:
            own_s = min(own_s, max(_MOST_CHARGED * statistics.median(known), self._earned_in(_MOST_CHARGED_STEPS)))
        if self.samples:
            self._spend(own_s, on_watch=0.0)
        elif self.watches:
            self._spend(own_s, on_watch=1.0)
        else:
            self._spend(own_s, self._watch_share)

    def _spend(self, seconds: float, on_watch: float) -> None:
        # Debts beyond the earnings of the longest pause are cancelled: after that pause a sample or watch is due anyway.
        deepest = -self._earned_in(LONGEST_PAUSE)
        self._for_watch = max(self._for_watch - on_watch * seconds, deepest)
        self._for_samples = max(self._for_samples - (1 - on_watch) * seconds, deepest)

    def _earned_in(self, steps: int) -> float:
        """Return the seconds that this many usual steps earn."""
        return steps * self._earning * self._usual_bare
