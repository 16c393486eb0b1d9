"""Where one training step ends and the next begins, and which steps are sampled and watched.

A step ends when every optimizer known to belong to the model has stepped or was skipped, or when one of them
comes round again (a critic that steps five times to the generator's once). Without any optimizer each
backward that is followed by a new forward counts as a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpinspect.ranges.capture.budget import Budget
from mpinspect.ranges.capture.recording import Recording
from mpinspect.runtime.meter import Meter

#: Without an optimizer in sight a step ends after so many backwards, whatever the weights tell: counts must not pile up.
_MOST_MICRO_BATCHES = 256


@dataclass(frozen=True)
class Schedule:
    """Which steps are sampled: each of the first ``dense`` ones, and every ``every``-th from the first on.

    Raises:
        ValueError: ``every`` is no whole number of 1 or more, ``dense`` none of 0 or more.
    """

    every: int = 1
    dense: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.every, 1):
            raise ValueError(f"every={self.every!r}: give a whole number of steps, 1 or more (1 samples every step)")
        if not _is_whole(self.dense, 0):
            raise ValueError(f"dense={self.dense!r}: give a whole number of steps, 0 or more")

    def samples(self, step: int) -> bool:
        """Return whether this step (from 0) is sampled."""
        return step < self.dense or step % self.every == 0


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_measured(number: int) -> bool:
    """Return whether the observers that measure for diagnoses are at work in a step: the first ones, then ever fewer.

    Args:
        number: of the step among those that are sampled or watched, from 0. 0..3, the powers of two and each 256th are measured:
            what costs a percent of a step there costs a hundredth of that in a run.
    """
    return number < 4 or number & (number - 1) == 0 or number % 256 == 0


class StepClock:
    """Counts steps and micro-batches, and says which steps are sampled."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.step = 0
        self.micro_batch = 0
        #: Whether observers measure for diagnoses in this step, and how many steps before it were sampled or watched.
        self.measured = False
        self._seen_steps = 0
        self.backwards = 0
        self.skipped_steps = 0
        # Weakly: an optimizer that is gone ends no step, and its id may be given to another.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether a forward runs: one was seen, and no backward since.
        self.in_forward = False
        self._backward_since_forward = False

    @property
    def sampled(self) -> bool:
        """Whether the current step is sampled."""
        return self._schedule.samples(self.step)

    def begin(self, sampled: bool, watched: bool) -> None:
        """Decide whether to measure in the step that begins: between samples, with the watch off, nothing is."""
        is_seen = sampled or watched
        self.measured = is_seen and is_measured(self._seen_steps)
        self._seen_steps += is_seen

    @property
    def has_optimizers(self) -> bool:
        return bool(self._known)

    @property
    def waits_for_optimizer(self) -> bool:
        """Whether an optimizer belongs to the model and none has stepped in the current step."""
        return bool(self._known) and not self._done

    @property
    def begun(self) -> bool:
        """Whether anything happened in the current step."""
        return self.in_forward or self._backward_since_forward or bool(self._done)

    @property
    def after_backward(self) -> bool:
        """Whether a backward reached the model since the last forward."""
        return self._backward_since_forward

    def know(self, optimizer: object) -> None:
        """Take an optimizer that belongs to the model."""
        self._known.add(optimizer)

    def forward(self, updated: Callable[[], bool]) -> bool:
        """Take a training forward. Returns True if a step ended before it: the caller ends that step and calls again.

        ``updated`` tells whether the weights were updated since the last step; it is asked only where that decides.
        """
        if self._backward_since_forward:
            if not self._known and (self.micro_batch >= _MOST_MICRO_BATCHES or updated()):
                return True
            self.micro_batch += 1
        self.in_forward, self._backward_since_forward = True, False
        return False

    def backward(self) -> None:
        """Take a backward that reaches the model."""
        if not self._backward_since_forward:
            self.backwards += 1
        self.in_forward, self._backward_since_forward = False, True

    def backward_again(self, updated: Callable[[], bool]) -> bool:
        """Take a backward without a forward. Returns True if a step ended before it: the caller ends that step."""
        if not self._backward_since_forward:
            return False
        if self.micro_batch >= _MOST_MICRO_BATCHES or updated():
            return True
        self.micro_batch += 1
        self._backward_since_forward = False
        return False

    def optimizer_again(self, optimizer: object) -> bool:
        """Return whether this optimizer has stepped in the current step already: then that step is over before this one counts.

        Optimizers that did not step meanwhile are no longer waited for.
        """
        if optimizer not in self._done:
            return False
        self._known = weakref.WeakSet(self._done)
        return True

    def optimizer_done(self, optimizer: object, *, skipped: bool) -> bool:
        """Take an optimizer's step, or that it was skipped. Returns whether that ends the training step."""
        self.know(optimizer)
        self._done.add(optimizer)
        self.skipped_steps += skipped
        return all(known in self._done for known in self._known)

    def advance(self) -> None:
        """Begin the next step."""
        self.step += 1
        self.micro_batch = 0
        self._done.clear()
        self.in_forward = self._backward_since_forward = False


class Pace:
    """Chooses for each step whether it is sampled and watched: by the schedule, or as the budget allows.

    Args:
        clock: knows the schedule.
        budget: None: the schedule decides, and every step is watched.
        samples, watches: whether there is anything to sample, and whether there is a watch.
    """

    def __init__(self, clock: StepClock, budget: Budget | None, samples: bool, watches: bool) -> None:
        self._clock = clock
        self._budget = budget
        self._samples, self._watches = samples, watches

    @property
    def has_budget(self) -> bool:
        return self._budget is not None

    def next_step(self) -> tuple[bool, bool]:
        """Return whether the step that begins is sampled, and whether it is watched."""
        budget = self._budget
        if budget is None:
            return self._samples and self._clock.sampled, self._watches
        return self._samples and budget.samples, self._watches and budget.watches

    def settle(self, meter: Meter, recording: Recording, watched: bool) -> None:
        """Charge the step that ends to the budget, and record what it has cost.

        Args:
            watched: whether it was watched.
        """
        if self._budget is None:
            return
        step_s, own_s = meter.end_step()
        bare_s = self._budget.end_step(step_s, own_s)
        later_s = meter.next_step(self._budget.samples or self._budget.watches)
        self._budget.charge_later(later_s)
        recording.spent(watched, None if step_s is None else bare_s, own_s, later_s)
