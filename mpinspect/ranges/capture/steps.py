"""Decides where one training step ends and the next begins, and which steps are sampled and watched.

A step ends when every optimizer known to belong to the model has stepped or was skipped, or when one of them
steps again (a critic that steps five times per step of the generator). Without any optimizer, a step ends before a
forward or backward that follows a backward, if the weights were updated or the gradients cleared in between.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mpinspect.numeric.formats import FLOAT32
from mpinspect.ranges.capture.budget import Budget, Limit
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.records import BornInfinite, BrokenAlike, GradientsError, Record
from mpinspect.runtime.meter import Meter
from mpinspect.runtime.user_line import innermost_line, is_users

#: Maximum number of micro-batches per step without a known optimizer, even without an update, to bound the memory.
_MOST_MICRO_BATCHES = 256
#: Steps have stopped after this many backwards without one, and this many times as many as in any step before. Backwards have
#: stopped after as many forwards.
_FEWEST_OF_STOPPED, _MANY_TIMES = 12, 4


#: Up to this many calls of a module in one forward are all observed; beyond, this many to twice as many, evenly spread.
_ALL_CALLS = 32
#: Maximum number of observed calls of an optimizer's closure in one step.
MOST_CLOSURES = 4

#: The most further steps that are computed twice after an infinity or NaN, until one of them has an infinity or NaN again.
AFTER_EVENTS = 8
#: The most of them after the first infinity or NaN; each further step that has one leads to one more.
AT_ONCE = 5
#: The most steps that are computed twice for their rarer work: forwards without gradients, writes to buffers and frozen weights.
WITH_RARER_WORK = 2
#: Maximum number of steps that are computed twice because they are of a new kind, and of kinds that are distinguished.
OF_NEW_KIND, _MOST_KINDS = 2, 64
#: The errors of all gradients in 16 bits, relative to their size, that are too large to ignore and too small to name a cause. The
#: most further steps that are computed twice for them, each after as many steps again.
_UNEXPLAINED, FOR_ERRORS = (0.1, 0.5), 3
#: How many steps of one kind must have passed before, and how many of the new one.
_STEADY, _SETTLED = 4, 2
#: The steps in which a scaler searches for its first scale.
_SEARCHED = 16
#: Number of recent losses, and the factor by which a loss must exceed all of them.
_RECENT, _JUMP = 16, 4.0
#: Later steps that are computed twice: only with time do sums and moments saturate, and weights grow.
LATER_STEPS = (30, 100, 1000, 10_000)
#: The number of first forwards of an inference that are computed twice: of a prompt, and of the tokens that follow.
EARLY_FORWARDS = 2


@dataclass(frozen=True)
class Schedule:
    """Defines which steps are sampled: the first ``dense`` steps, and every ``every``-th step, beginning with step 0.

    Raises:
        ValueError: ``every`` is not a whole number of 1 or more, or ``dense`` not one of 0 or more.
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
    """Return whether the observers that measure for diagnoses are at work in a step.

    Steps 0..3, powers of two and every 256th are measured: a cost of 1% of such a step is about 0.01% of a long run.

    Args:
        number: number of the step among the sampled or watched steps, from 0.
    """
    return number < 4 or number & (number - 1) == 0 or number % 256 == 0


class StepClock:
    """Counts steps and micro-batches, and decides whether the current step is sampled."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.step = 0
        self.micro_batch = 0
        #: Whether observers measure for diagnoses in this step, and how many steps so far were sampled or watched.
        self.measured = False
        self._seen_steps = 0
        self.backwards = 0
        #: Backwards of the unfinished step, and the most in a finished one.
        self.backwards_of_step = self.most_backwards = 0
        #: The lines that called the backwards of finished steps, as far as measured, and of the running one; and a line that did
        #: so long after the last step.
        self._lines: set[str] = set()
        self._lines_of_step: set[str] = set()
        self._late_line = ""
        self.skipped_steps = 0
        #: Whether a step has been skipped after those in which a scaler searches for its scale.
        self._skipped_late = False
        #: Whether the whole model has run since the last backward of a loss.
        self.model_ran = False
        #: Calls of the model's modules without gradients.
        self.calls_without_gradient = 0
        #: The first module called in the last forward, and the shapes and dtypes of its outputs.
        self.forward_kind: tuple[str, Hashable] = ("", None)
        #: The names of the losses' last operations.
        self.loss_kind: Hashable = None
        #: The jumps of the loss, as far as it is read on the host, and the forwards that no backward has followed.
        self.loss_level, self.left_out = LossLevel(), ForwardsLeftOut()
        #: Forwards since the running step of an optimizer began: calls of its closure. None outside of such a step.
        self._closures: int | None = None
        #: Whether closures of any step were called more often than they are observed.
        self.any_closure_left_out = False
        # Weak references: a deleted optimizer must not hold up a step, and its id may be reused.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether an optimizer was ever known: at the end of a script, those that its functions made are deleted.
        self._had_optimizers = False
        #: Whether a forward has begun and no backward since, and whether a backward reached the model since the last forward.
        self.in_forward = self.after_backward = False

    @property
    def sampled(self) -> bool:
        return self.schedule.samples(self.step)

    def begin(self, sampled: bool, watched: bool) -> None:
        """Decide whether to measure for diagnoses in the step that begins; only sampled or watched steps are measured."""
        is_seen = sampled or watched
        self.measured = is_seen and is_measured(self._seen_steps)
        self._seen_steps += is_seen

    @property
    def kind(self) -> tuple[str, Hashable]:
        """The module that the last forward began with, and the other properties that distinguish kinds of steps."""
        first, kind = self.forward_kind
        return first, (kind, self.loss_kind, self.loss_level.jumps, self._skipped_late)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has begun whose loss has had no backward."""
        return self.in_forward or self.model_ran

    @property
    def has_optimizers(self) -> bool:
        return bool(self._known)

    @property
    def waits_for_optimizer(self) -> bool:
        """Whether the model has or had a known optimizer but no optimizer has stepped in the current step."""
        return self._had_optimizers and not self._done

    @property
    def begun(self) -> bool:
        """Whether anything happened in the current step."""
        return self.in_forward or self.after_backward or bool(self._done)

    @property
    def enough_closures(self) -> bool:
        """Whether the running optimizer's step has called its closure more often than the calls are observed."""
        return self._closures is not None and self._closures > MOST_CLOSURES

    @property
    def has_stopped(self) -> bool:
        """Whether far more backwards of the training have run since the last step than ran in any step before."""
        least = max(_FEWEST_OF_STOPPED, _MANY_TIMES * self.most_backwards)
        is_of_training = not self._late_line or self._late_line in self._lines
        return self._had_optimizers and self.backwards_of_step >= least and is_of_training

    def optimizer_begins(self) -> None:
        """Record that an optimizer begins its step, which may call a closure."""
        self._closures = 0

    def know(self, optimizer: object) -> None:
        """Register an optimizer that belongs to the model."""
        self._known.add(optimizer)
        self._had_optimizers = True

    def forward(self, updated: Callable[[], bool]) -> bool:
        """Record a training forward; return True if a step ended before it, so the caller must end that step and call again.

        ``updated`` returns whether the weights were updated since its last call; it is called only if the result depends
        on that.
        """
        if self.after_backward:
            if not self._known and (self.micro_batch >= _MOST_MICRO_BATCHES or updated()):
                return True
            self.micro_batch += 1
        self.in_forward, self.after_backward = True, False
        if self._closures is not None:
            self._closures += 1
            self.any_closure_left_out |= self.enough_closures
        return False

    def backward_called(self) -> None:
        """Remember the line that calls a backward, if it may tell whether a late one is the training's."""
        if self.backwards_of_step == _FEWEST_OF_STOPPED:
            self._late_line = innermost_line(sys._getframe())
        elif self.measured:
            self._lines_of_step.add(innermost_line(sys._getframe()))

    def backward(self, *, is_inner: bool = False) -> None:
        """Record a backward that reaches the model; ``is_inner``: the loss is computed from its gradients, as a penalty is."""
        if not self.after_backward:
            self.backwards += 1
            self.backwards_of_step += 1
            self.left_out.backward_runs()
        self.in_forward, self.after_backward = False, True
        self.model_ran &= is_inner

    def backward_again(self, updated: Callable[[], bool]) -> bool:
        """Record a backward without a new forward; return True if a step ended before it, so the caller must end that step."""
        if not self.after_backward:
            return False
        if self.micro_batch >= _MOST_MICRO_BATCHES or updated():
            return True
        self.micro_batch += 1
        self.after_backward = False
        return False

    def optimizer_again(self, optimizer: object) -> bool:
        """Return whether this optimizer has already stepped in the current step, so that the step ended before this call.

        If so, forget the optimizers that did not step in it: steps no longer wait for them.
        """
        if optimizer not in self._done:
            return False
        self._known = weakref.WeakSet(self._done)
        return True

    @property
    def may_be_aside(self) -> bool:
        """Whether the last backward may have served another model's optimizer that steps now: this model's have not stepped."""
        return self.waits_for_optimizer and self.after_backward

    def optimizer_done(self, optimizer: object, *, skipped: bool) -> bool:
        """Record that an optimizer stepped or was skipped; return whether this ends the training step."""
        self.know(optimizer)
        self._done.add(optimizer)
        self._closures = None
        self.skipped_steps += skipped
        self._skipped_late |= skipped and self.step >= _SEARCHED
        return all(known in self._done for known in self._known)

    def advance(self, finished: bool = True) -> None:
        """Begin the next step; if the last one was broken off, its backwards still count as without an optimizer's step."""
        self.step += 1
        if finished:
            self.most_backwards = max(self.most_backwards, self.backwards_of_step)
            self.backwards_of_step = 0
            self._lines |= self._lines_of_step
        self._lines_of_step.clear()
        self.micro_batch = 0
        self._done.clear()
        self.in_forward, self.after_backward, self.model_ran = False, False, False


class CallChoice:
    """Chooses the calls of each module that are observed in a forward: all, or an evenly spread part if they are many.

    A recurrent cell is called once per time step. The number of calls in one forward sets the share chosen in the next. In the
    first such forward, the share falls as calls accumulate. The choice shifts by one with each forward.
    """

    def __init__(self) -> None:
        self._forwards = 0
        #: Calls and chosen calls in the current forward, by module.
        self._calls: dict[str, int] = {}
        self._chosen: dict[str, int] = {}
        #: By module with calls left out: n, where one call in n is chosen.
        self._one_in: dict[str, int] = {}
        #: By module with calls left out: the maximum number of calls in one forward, and how many of them were observed.
        self.often: dict[str, tuple[int, int]] = {}
        #: Whether any call of the current step was left out.
        self.any_left_out = False

    def begin_forward(self) -> None:
        """Begin a forward, after the previous forward's backward or in a new step."""
        for path in self._chosen:
            calls = self._calls[path]
            self._one_in[path] = 1 << max((calls // _ALL_CALLS).bit_length() - 1, 0)
            self.often[path] = max(self.often.get(path, (0, 0)), (calls, self._chosen[path]))
        self._forwards += 1
        self._calls.clear()
        self._chosen.clear()

    def takes(self, path: str) -> bool:
        """Return whether to observe the call of a module that has just ended."""
        number = self._calls.get(path, 0)
        self._calls[path] = number + 1
        if number < _ALL_CALLS and path not in self._one_in:
            return True
        one_in = 1 << (number // _ALL_CALLS).bit_length()
        if path in self._one_in:
            one_in = max(self._one_in[path], one_in >> 1)
        is_taken = number % one_in == self._forwards % one_in
        self._chosen[path] = self._chosen.get(path, _ALL_CALLS * (path not in self._one_in)) + is_taken
        self.any_left_out |= not is_taken
        return is_taken


class Pace:
    """Chooses for each step whether it is sampled and watched, by the schedule or the budget.

    Args:
        clock: has the schedule.
        budget: the budget that decides; None if the schedule decides, and every step is watched.
        limit: the cost above which a budget replaces the schedule; None: never.
        samples, watches: whether there is anything to sample, and whether there is a watch.
    """

    def __init__(
        self, clock: StepClock, budget: Budget | None, limit: Limit | None, samples: bool, watches: bool
    ) -> None:
        self._clock = clock
        self._budget, self._limit = budget, limit
        #: Seconds of the inspector and of bare training that count towards the limit, over how many steps.
        self._own_s = self._bare_s = 0.0
        self._measured_steps = 0
        self._samples, self._watches = samples, watches
        #: Whether the current step is sampled, and whether it is watched.
        self.sampled = self.watched = False
        #: Whether sampling and watching are paused.
        self.resting = False

    def begin_step(self) -> None:
        """Decide whether the step that begins is sampled, and whether it is watched."""
        budget, at_work = self._budget, not self.resting
        samples, watches = (self._clock.sampled, True) if budget is None else (budget.samples, budget.watches)
        self.sampled, self.watched = at_work and self._samples and samples, at_work and self._watches and watches
        self._clock.begin(self.sampled, self.watched)

    def settle(self, meter: Meter, recording: Recording) -> None:
        """Charge the cost of the ending step to the budget and record it, or compare it to the limit."""
        step_s, own_s = meter.end_step()
        if self._budget is None:
            self._own_s += own_s + meter.next_step(True)
            if step_s is None:
                self._own_s = 0.0
            else:
                self._bare_s += max(step_s - own_s, 0.0)
                self._measured_steps += 1
            if self._limit is not None and self._limit.is_exceeded(self._own_s, self._bare_s):
                self._begin_budget(self._limit, recording)
            return
        bare_s, own_s = self._budget.end_step(step_s, own_s)
        later_s = meter.next_step(self._budget.samples or self._budget.watches)
        self._budget.charge_later(later_s)
        recording.spent(self.watched, None if step_s is None else bare_s, own_s, later_s)

    def _begin_budget(self, limit: Limit, recording: Recording) -> None:
        self._budget = Budget(
            limit.share, every=self._clock.schedule.every, samples=self._samples, watches=self._watches
        )
        recording.limited(self._clock.step + 1, self._measured_steps, self._bare_s, self._own_s)
        recording.note(
            f"the inspection took {self._own_s:.3g} s of the first {self._clock.step + 1:,} steps, the training itself "
            f"{self._bare_s:.3g} s: in the steps after, it is limited to {limit.share:.0%} of the training's own time, and "
            "not every step is watched. max_overhead=0.02 sets another limit, max_overhead=math.inf none (mpinspect run: "
            "--max-overhead 0.02, --max-overhead none)"
        )


class ForwardsLeftOut:
    """Counts the model's latest forwards without a backward, from places in the script whose forwards had one before."""

    def __init__(self) -> None:
        self._trained: set[Hashable] = set()
        self._place: Hashable = None
        #: The forwards since the last backward, the most before any backward, and the lines of the latest one.
        self.number = self._most = 0
        self.lines: tuple[str, ...] = ()

    def forward_ran(self, frame: FrameType | None) -> None:
        """Handle a forward of the whole model that this frame has called; None if it is not known."""
        callers = [each for each in (frame, frame and frame.f_back) if each is not None and is_users(each)]
        self._place = tuple((each.f_code.co_filename, each.f_lineno) for each in callers)
        is_trained = self._place in self._trained
        self.number += is_trained
        if is_trained and self.number >= _FEWEST_OF_STOPPED:
            self.lines = tuple(map(innermost_line, callers))

    def backward_runs(self) -> None:
        """Handle a backward of the model."""
        self._trained.add(self._place)
        self.number, self._most = 0, max(self._most, self.number)

    @property
    def is_stopped(self) -> bool:
        """Whether so many are left out that the loop seems to leave its body before the backward."""
        return self.number >= max(_FEWEST_OF_STOPPED, _MANY_TIMES * self._most)


class LossLevel:
    """Counts how often the loss has jumped far above all recent losses and has stayed there for another step."""

    def __init__(self) -> None:
        self.jumps = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._was_high = False

    def add(self, loss: float) -> None:
        """Handle the finite magnitude of a step's loss."""
        is_high = len(self._recent) == _RECENT and loss > _JUMP * max(self._recent)
        if is_high and self._was_high:
            self.jumps += 1
            self._recent.clear()
        if not is_high:
            self._recent.append(loss)
        self._was_high = is_high


@dataclass(slots=True)
class _KindsOf:
    """The kinds of the steps that begin with one module.

    Args:
        known: all kinds so far.
        last, steps: the latest kind, and the number of steps in a row that had it.
        was_steady: whether an earlier kind was steady.
    """

    known: set[Hashable]
    last: Hashable
    steps: int = 0
    was_steady: bool = False


class Kinds:
    """Detects steps of a new kind, as in a new phase of training: longer sequences, another loss or precision, a loss that has
    jumped, or the steps after the first late skip.

    A kind counts only if it stays: batches of ever new lengths never do, nor does the smaller batch that ends an epoch.
    """

    def __init__(self) -> None:
        #: By the first module: which modules report depends on whether a step is sampled.
        self._of: dict[str, _KindsOf] = {}

    def has_settled(self, first: str, kind: Hashable) -> bool:
        """Handle the end of a step; return whether it made a new kind one that stays."""
        found = self._of.setdefault(first, _KindsOf(set(), kind))
        if len(found.known) > _MOST_KINDS:
            return False
        if kind != found.last:
            found.was_steady = found.steps >= _STEADY and kind not in found.known
            found.last, found.steps = kind, 0
        found.known.add(kind)
        found.steps += 1
        return found.was_steady and found.steps == _SETTLED


#: The number of chosen steps whose FP32 operators are computed in FP64, and the seconds for all such steps of a run.
_IN_FP64, MOST_SECONDS_IN_FP64 = 2, 5.0


class StepChoice:
    """Chooses the steps that are computed twice: given ones, some after an infinity or NaN that no loss scale explains, some
    that do rarer work, such as a validation, if it recurs at a regular interval, some after a new kind of steps began, and some
    after a step whose gradients had errors that may grow.

    Args:
        steps: numbers of steps after which the next one is chosen.
        after_events: the most steps chosen after an infinity or NaN.
        by_work: whether steps are chosen for their rarer work, their kind and their errors.
    """

    def __init__(
        self, steps: Iterable[int] = LATER_STEPS, after_events: int = AFTER_EVENTS, by_work: bool = True
    ) -> None:
        self._steps = sorted(set(steps))
        self._left_after_events = after_events
        self._chosen_after_events = 0
        self._is_after_event = False
        self._left_with_rarer_work = by_work * WITH_RARER_WORK
        #: Whether the first infinity or NaN is still to have a step with rarer work, which may have made it.
        self._awaits_break = by_work
        self._left_of_new_kind = by_work * OF_NEW_KIND
        #: The rarer work so far, None before the first step, and the last two steps in which it grew.
        self._work: int | None = None
        self._worked: tuple[int, ...] = ()
        self._kinds = Kinds()
        self._is_of_new_kind = False
        self._begun, self._left_for_errors = 0, by_work * FOR_ERRORS
        self._left_in_fp64 = _IN_FP64
        self._seconds_in_fp64 = MOST_SECONDS_IN_FP64

    def choose(self, steps: Iterable[int]) -> None:
        """Choose further steps."""
        self._steps = sorted({*self._steps, *steps})

    def passed(self, step: int, work: int, first: str = "", kind: Hashable = None) -> None:
        """Handle the end of a step.

        Args:
            work: a number that grows with each piece of rarer work.
            first, kind: the module that the step began with, and the other properties that distinguish kinds of steps.
        """
        if self._work not in (None, work):
            self._worked = (*self._worked[-1:], step)
        self._work = work
        self._is_of_new_kind = self._left_of_new_kind > 0 and self._kinds.has_settled(first, kind)

    def is_due(self, step: int, broken_phases: Callable[[], Sequence[str]]) -> bool:
        """Return whether the step that follows ``step`` others is chosen; ``broken_phases``: as of ``Recording``."""
        if self._awaits_break and broken_phases():
            self._awaits_break, self._left_with_rarer_work = False, max(self._left_with_rarer_work, 1)
        if self._is_planned(step):
            return True
        if self._left_after_events < 1:
            return False
        broken = len(broken_phases())
        return broken > 0 and self._chosen_after_events < broken + AT_ONCE - 1

    def begins(self, step: int) -> float:
        """Handle the start of a chosen step. Return the seconds for its operators in FP64: 0 but in the first such steps, and
        after an infinity or NaN."""
        self._begun, self._is_after_event = step, not self._is_planned(step)
        self._left_with_rarer_work -= self._has_rarer_work(step)
        self._left_of_new_kind -= self._is_of_new_kind
        self._is_of_new_kind = False
        self._left_after_events -= self._is_after_event
        self._chosen_after_events += self._is_after_event
        self._steps = [each for each in self._steps if each > step]
        self._left_in_fp64 -= 1
        return self._seconds_in_fp64 * (self._is_after_event or self._left_in_fp64 >= 0)

    def took(self, seconds_in_fp64: float) -> None:
        """Handle that a chosen step took this long in FP64."""
        self._seconds_in_fp64 = max(0.0, self._seconds_in_fp64 - seconds_in_fp64)

    def ends(self, records: Sequence[Record], broken_phases: Sequence[str]) -> None:
        """Handle the records of a chosen step: once one has the infinity or NaN, no further step is needed for it."""
        errors = (each.error for each in records if isinstance(each, GradientsError) and each.text != FLOAT32.name)
        least, most = _UNEXPLAINED
        # Of earlier steps the next planned one comes soon.
        is_late = self._left_for_errors and self._begun >= LATER_STEPS[0]
        if is_late and least <= max(errors, default=0.0) < most:
            self._left_for_errors -= 1
            self.choose((2 * self._begun,))
        broken = (record for record in records if isinstance(record, (BornInfinite, BrokenAlike)))
        # The forward before the backward, as in the alphabet.
        if self._is_after_event and any(record.names[2] == max(broken_phases, default="") for record in broken):
            self._left_after_events = 0

    def _is_planned(self, step: int) -> bool:
        return self._has_come(step) or self._has_rarer_work(step) or self._is_of_new_kind

    def _has_rarer_work(self, step: int) -> bool:
        """Return whether a step is the next one with rarer work, if the interval of the last two such steps repeats."""
        if not self._left_with_rarer_work or len(self._worked) < 2:
            return False
        before, last = self._worked
        return last - before > 1 and step == 2 * last - before

    def _has_come(self, step: int) -> bool:
        return bool(self._steps) and step >= self._steps[0]
