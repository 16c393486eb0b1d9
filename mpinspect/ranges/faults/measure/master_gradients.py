"""An observer that compares the model's gradients after a backward with the gradients of the master weights.

The loop's own code transfers them: it copies, adds, divides by the loss scale, clips. The observer records the factor of this
division, and three faults: gradients that became zero or finite on the way, gradients of earlier steps that were added, and
masters that are stepped but never copied back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mpinspect.ranges.capture.host_rows import Arrivals, HostCopy
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Backward, Observer
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import StepClock
from mpinspect.ranges.faults.measure.handed_over import (
    Magnitudes,
    Records,
    described,
    magnitudes,
    ratios,
)
from mpinspect.ranges.faults.measure.masters import Masters, Samples, samples
from mpinspect.ranges.records import (
    ChangedBeforeStep,
    MastersAddedUp,
    MastersGivenSmaller,
    MastersNotCopied,
    MastersOverwritten,
    ReplacedBeforeStep,
)
from mpinspect.runtime.distributed import has_process_group

#: Minimum number of the masters' steps after which the weights must have changed.
_FEWEST_STEPS = 3
#: Gradients that are smaller by this factor or more at the masters count as divided, for example by a loss scale.
_DIVIDED = 2.0

#: Maximum number of a step's backwards whose gradients are compared with the masters' gradients.
_MOST_BACKWARDS = 4
#: Minimum share of the masters' gradients that the step's own backwards leave unexplained.
_UNEXPLAINED = 0.01
#: Maximum part of that share that stays unexplained once the masters' earlier gradients are included.
_REST = 0.1


@dataclass
class _Step:
    """The evidence of one step, judged when it has reached the host.

    Args:
        given, handed: the weights' gradients after the last backward, and the masters' gradients when their optimizers step.
        stepping: the masters in optimizers that step.
        backwards: how many backwards the step had.
        before, parts, sums: a few elements of the masters' gradients before the first backward, of the weights' gradients after
            each backward, and of the masters' gradients when their optimizers step.
    """

    given: Magnitudes | None = None
    handed: list[Magnitudes] = field(default_factory=list)
    stepping: set[str] = field(default_factory=set)
    backwards: int = 0
    before: Samples | None = None
    parts: list[Samples] = field(default_factory=list)
    sums: list[Samples] = field(default_factory=list)

    def forget(self) -> None:
        """Drop the gradients of the last backward, and the optimizers' copies."""
        self.given = None
        self.handed.clear()
        self.stepping.clear()
        self.sums.clear()

    def copies(self) -> list[HostCopy]:
        """Return the copies that judging the step reads."""
        found = [copy for each in (self.given, *self.handed) if each is not None for copy in each.copies()]
        return found + [
            copy for each in (self.before, *self.parts, *self.sums) if each is not None for copy in each.copies
        ]


class MasterGradients(Observer):
    """Compares the gradients of weights and of their masters, in measured steps of runs that have masters.

    Args:
        masters: finds them.
        clock: the run's step clock.
        recording: receives the measurements; none in a distributed run, where the time of averaging the gradients is unknown.
    """

    def __init__(self, masters: Masters, clock: StepClock, recording: Recording) -> None:
        self._masters, self._clock = masters, clock
        self._records = Records(recording)
        self._stepped = False
        #: A few elements of the weights with masters, from before the masters' first step; and the number of steps since.
        self._began: Samples | None = None
        self._steps = 0
        #: For each measured step, the common factor of division between the weights' and the masters' gradients; NaN without
        #: one.
        self._divisors: list[float] = []
        #: A few elements of the masters after their last step, by the optimizer's id.
        self._after: dict[int, Samples] = {}
        self._now = _Step()
        #: The steps whose gradients have not reached the host.
        self._arrivals = Arrivals()

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self.wants_backward_end = self._clock.measured and not has_process_group()
        self._now = _Step()

    def backward_begins(self, backward: Backward) -> None:
        """Record the masters' gradients before the step's first backward."""
        if not self._now.backwards:
            self._masters.find_all()
            if self._stepped:
                self._now.before = samples(_gradients(self._masters.all()))

    def backward_ends(self) -> None:
        """Record the weights' gradients, and drop the masters': a closure may run a backward within the optimizer's step."""
        self._now.backwards += 1
        self._now.forget()
        weights = self._masters.weights()
        if weights:
            self._now.given = magnitudes(weights)
            if self._now.before is not None and self._now.backwards <= _MOST_BACKWARDS:
                self._now.parts.append(samples(_gradients(weights)))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the masters' gradients, which the optimizer is about to use."""
        if not self.at_work:
            return
        masters = list(self._masters.of(optimizer))
        if masters and self._began is None:
            self._began = samples((each.name, each.parameter) for each in self._masters.weights())
        if masters and id(optimizer) in self._after:
            self._compare_with_weights(self._after.pop(id(optimizer)), masters)
        if self._now.given is not None:
            self._now.stepping.update(master.name for master in masters)
            self._now.handed.append(magnitudes(masters))
            self._now.sums.append(samples(_gradients(masters)))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped: gradients that the masters still hold at the next backward are left over."""
        self._stepped = True
        self._steps += self._began is not None
        self._after.pop(id(optimizer), None)
        if self.at_work and (masters := list(self._masters.of(optimizer))):
            self._after[id(optimizer)] = samples((each.name, each.parameter) for each in masters)

    def end_step(self, step: int, sampled: bool) -> None:
        """Compare the gradients of steps whose copies are complete; record lost and added gradients."""
        self._arrivals.take()
        now = self._now
        if self.at_work and now.given is not None and now.stepping:
            self._arrivals.call(now.copies(), partial(self._judge, step, now, now.given))

    def run_ends(self) -> None:
        """Record masters that changed while their weights did not, and the factor of division of the gradients."""
        self._arrivals.take(wait=True)
        self._masters.settle()
        if self._divisors and all(divisor >= _DIVIDED for divisor in self._divisors):
            self._records.add(
                MastersGivenSmaller(
                    step=self._clock.step,
                    names=tuple(each.name for each in self._masters.weights()),
                    least=min(self._divisors),
                    most=max(self._divisors),
                    steps=len(self._divisors),
                )
            )
        if self._began is None or self._steps < _FEWEST_STEPS:
            return
        weights = {each.name: each.parameter for each in self._masters.weights()}
        masters = samples((each.name, each.parameter) for each in self._masters.all()).read()
        began, ended = self._began.read(), samples(weights.items()).read()
        is_still = began.keys() == ended.keys() and all(torch.equal(began[name], ended[name]) for name in began)
        # A master may differ from its weight by the rounding of the copy.
        moved = [
            name
            for name, values in masters.items()
            if name in ended and not torch.equal(values.to(weights[name].dtype).double(), ended[name])
        ]
        if is_still and 2 * len(moved) > len(masters):
            self._records.add(
                MastersNotCopied(step=self._clock.step, names=tuple(moved), steps=self._steps, of=len(masters))
            )

    def _compare_with_weights(self, after: Samples, masters: Sequence[WatchedParameter]) -> None:
        """Find masters that changed between two steps and now equal their weights: the weights overwrote them."""
        now = samples((each.name, each.parameter) for each in masters)
        weights = samples((each.name, each.parameter) for each in self._masters.weights())
        copies = [*after.copies, *now.copies, *weights.copies]
        last = self._clock.step - 1
        self._arrivals.call(copies, partial(self._judge_overwritten, last, after, now, weights))

    def _judge_overwritten(self, step: int, after: Samples, now: Samples, weights: Samples) -> None:
        before, here, theirs = after.read(), now.read(), weights.read()
        changed = [name for name in here if name in before and not torch.equal(before[name], here[name])]
        written = [name for name in changed if name in theirs and torch.equal(here[name], theirs[name])]
        if written and len(written) == len(changed):
            moved = torch.cat([before[name] != here[name] for name in written]).double().mean()
            self._records.add(MastersOverwritten(step=step, names=tuple(written), changed=float(moved)))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _judge(self, step: int, seen: _Step, given_to_weights: Magnitudes) -> None:
        """Record the findings of one step."""
        given = {name: value for name, value in given_to_weights.read().items() if name in seen.stepping}
        handed = {name: value for found in seen.handed for name, value in found.read().items()}
        self._find_lost(step, seen, given, handed, given_to_weights.sum_of_squares())
        self._find_added_up(step, seen)

    def _find_lost(
        self, step: int, seen: _Step, given: Mapping[str, float], handed: Mapping[str, float], squares: float
    ) -> None:
        """Record gradients that became zero (None counts as zero) or finite between the backward and the masters."""
        broken = [name for name, value in given.items() if not math.isfinite(value)]
        if broken and not handed:
            # A loop may skip a step by passing no gradients to its optimizer.
            return
        changes = ratios(given, {**dict.fromkeys(given, 0.0), **handed})
        change = described(changes)
        self._divisors.append(1 / change.factor if change.is_uniform and change.factor else math.nan)
        # With several backwards an earlier one may have been infinite, so only a single one is judged.
        is_single = seen.backwards == 1
        zeroed = [name for name, ratio in changes.items() if ratio == 0 or (is_single and math.isnan(ratio))]
        if zeroed:
            self._records.add(
                ChangedBeforeStep(
                    step=step,
                    names=tuple(zeroed),
                    **change._asdict(),
                    zeroed=len(zeroed),
                    sum_of_squares=squares,
                    not_finite=len(broken),
                    masters=True,
                    nans=sum(not math.isfinite(value) for value in handed.values()),
                    without=sum(name not in handed for name in zeroed),
                )
            )
        replaced = [name for name in broken if is_single and 0 < handed.get(name, math.nan) < math.inf]
        if replaced:
            self._records.add(ReplacedBeforeStep(step=step, names=tuple(replaced), of=len(given)))

    def _find_added_up(self, step: int, seen: _Step) -> None:
        """Record masters' gradients that are a sum of this step's gradients and of their own earlier gradients."""
        if seen.before is None or not 0 < seen.backwards <= _MOST_BACKWARDS:
            return
        before = seen.before.read()
        parts = [part.read() for part in seen.parts]
        sums = {name: values for found in seen.sums for name, values in found.read().items()}
        names = [name for name in sums if all(name in each for each in (before, *parts))]
        if not names:
            return
        joined = [torch.cat([each[name] for name in names]) for each in (before, *parts, sums)]
        if not all(torch.isfinite(each).all() and each.any() for each in joined):
            return
        *columns, wanted = joined
        _, unexplained = _fitted(columns[1:], wanted)
        (kept, *_, added), rest = _fitted(columns, wanted)
        if unexplained >= _UNEXPLAINED and rest <= _REST * unexplained and kept > _REST:
            self._records.add(
                MastersAddedUp(
                    step=step,
                    names=tuple(names),
                    kept=kept,
                    added=added,
                    largest=float(wanted.abs().max()),
                    parameters=len(names),
                    of=len(sums),
                )
            )


def _gradients(parameters: Iterable[WatchedParameter]) -> list[tuple[str, torch.Tensor | None]]:
    return [(watched.name, watched.parameter.grad) for watched in parameters]


def _fitted(columns: Sequence[torch.Tensor], wanted: torch.Tensor) -> tuple[list[float], float]:
    """Return the least-squares coefficients of the columns for a vector, and the residual's share of its norm."""
    sizes = torch.stack([column.norm() for column in columns])
    matrix = torch.stack(list(columns), dim=1) / sizes
    factors = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution[:, 0]
    rest = (wanted - matrix @ factors).norm() / wanted.norm()
    return (factors / sizes).tolist(), float(rest)
