"""An observer of weights that no longer change while their optimizer steps, of the loss in these steps, and of low rates."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile, zip_longest
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpinspect.ranges.capture.optimizers import learning_rates
from mpinspect.ranges.faults.measure.masters import Samples, samples
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.records import RateFallen, RateZero, Standstill

#: Minimum number of steps with a learning rate other than 0 in which the weights must stay the same, and of measured steps among
#: them with a gradient: rows of a table that no sample uses stay the same, too.
_FEWEST_STEPS, _FEWEST_GRADIENTS = 8, 2
#: A learning rate is low if it is at most this part of its highest. The weights stand still if they change by less than this part
#: of their norm.
_LOW, _STILL = 1e-4, 1e-3


class _Seen(NamedTuple):
    """A few elements of the weights at the end of a measured step, and the optimizers' steps until then.

    Args:
        loss: the first loss of the step; None if none was read.
        has_gradient: whether an element that was read had a gradient.
    """

    step: int
    steps: int
    weights: dict[str, torch.Tensor]
    loss: float | None
    has_gradient: bool


@dataclass
class _Spell:
    """The latest steps of an optimizer, as long as they have something in common: their number, and the first one."""

    steps: int = 0
    since: int = 0

    def goes_on(self, step: int, is_so: bool) -> None:
        """Count a step if it has it in common, or end the spell."""
        self.steps, self.since = is_so * (self.steps + 1), self.since if self.steps else step


@dataclass
class _Rates:
    """An optimizer's steps, from ``first`` to ``last``, its highest and latest rates, and its spells at zero and low ones."""

    name: str
    first: int
    last: int = 0
    steps: int = 0
    highest: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    zero: _Spell = field(default_factory=_Spell)
    low: _Spell = field(default_factory=_Spell)
    #: Whether a schedule that waits for a number existed when the rates were low first; None before.
    by_metric: bool | None = None

    def add(self, step: int, rates: list[float]) -> None:
        """Count a step with these learning rates of the groups; [] if they are unknown."""
        self.last, self.steps, self.latest = step, self.steps + 1, rates
        self.highest = [max(pair) for pair in zip_longest(self.highest, rates, fillvalue=0.0)]
        self.zero.goes_on(step, bool(rates) and not any(rates))
        self.low.goes_on(
            step, bool(rates) and all(now <= _LOW * most for now, most in zip(rates, self.highest, strict=False))
        )
        if self.low.steps and self.by_metric is None:
            # A type, since an object of the script's may answer isinstance with code of its own.
            self.by_metric = any(issubclass(type(each), ReduceLROnPlateau) for each in gc.get_objects())

    def goes_on(self, step: int) -> bool:
        """Return whether the optimizer has paused before ``step`` for at most two of its usual intervals."""
        return (step - self.last) * self.steps <= 2 * (self.last + 1 - self.first)


class StandingStill(Measuring):
    """Compares a few elements of weights at the ends of measured steps and of the run; never waits during the run.

    Weights in 16 bits are not compared bit by bit: updates of their masters may add up before one shows.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = 0
        #: By the optimizer's id; if Python reuses the id, the steps of both optimizers count as one's.
        self._rates: dict[int, _Rates] = {}
        self._loss: Sent | None = None
        self._given: list[Samples] = []
        #: The measured steps, some two for each power of two.
        self._seen: list[_Seen] = []

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        super().begin_step(sampled, watched)
        self._loss = None
        self._given.clear()

    def backward_called(self, losses: list[torch.Tensor]) -> None:
        """Send the first loss of the step to the host."""
        if self._loss is None and len(losses) == 1 and losses[0].numel() == 1:
            self._loss = Sent.of([("", losses[0].detach().reshape(()))])

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps that are meant to change the weights, and read their gradients; a closure has made them by now."""
        rates = self._rates.setdefault(id(optimizer), _Rates(type(optimizer).__name__, self._clock.step))
        rates.add(self._clock.step, learning_rates(optimizer))
        self._steps += not rates.zero.steps
        if self.at_work:
            stepped = (*self._optimizers.parameters(optimizer), *self._masters.of(optimizer))
            self._given.append(samples((each.name, each.parameter.grad) for each in stepped))

    def end_step(self, step: int, sampled: bool) -> None:
        """Send a few elements of each weight to the host."""
        super().end_step(step, sampled)
        if self.at_work:
            weights, given, loss = self._weights(), tuple(self._given), self._loss
            copies = [copy for each in (weights, *given) for copy in each.copies]
            copies += loss.copies if loss is not None else ()
            self._arrivals.call(copies, partial(self._see, step, self._steps, weights, given, loss))

    def run_ends(self) -> None:
        """Record low learning rates, and the weights that are the same at the run's end as at the end of an earlier step."""
        super().run_ends()
        if not self._seen:
            return
        # The optimizers may be gone.
        now = {each.name: each.parameter for each in self._parameters if each.name in self._seen[-1].weights}
        ended = samples(now.items()).read()
        for each in self._rates.values():
            if each.goes_on(self._clock.step):
                self._judge_rates(each, ended)
        if any(parameter.dtype is not torch.float32 for parameter in now.values()):
            return
        same = [*takewhile(lambda seen: _are_equal(seen.weights, ended), reversed(self._seen))][::-1]
        if len(same) > 1 and self._steps - same[0].steps >= _FEWEST_STEPS and _are_trained(same[1:], _FEWEST_GRADIENTS):
            losses = [seen.loss for seen in same[1:] if seen.loss is not None]
            loss = losses[0] if len(set(losses)) == 1 else None
            steps = self._steps - same[0].steps
            self._record(Standstill(step=same[0].step, steps=steps, losses=len(losses), loss=loss))

    def _judge_rates(self, rates: _Rates, ended: dict[str, torch.Tensor]) -> None:
        """Record the latest steps of an optimizer at learning rates of 0, or at low ones if these are more than twice as many."""
        low, zero, of = rates.low, rates.zero, rates.steps
        if zero.steps >= max(_FEWEST_STEPS, low.steps / 2):
            self._record(RateZero(step=zero.since, text=rates.name, steps=zero.steps, of=of))
            return
        began = next(
            (seen for seen in self._seen if seen.step >= low.since - 1 and seen.weights.keys() == ended.keys()), None
        )
        later = [seen for seen in self._seen if seen.step >= low.since]
        if low.steps < _FEWEST_STEPS or began is None or not _are_trained(later, 1):
            return
        before, after = (torch.cat([values[name] for name in ended]) for values in (began.weights, ended))
        moved = float((after - before).norm() / before.norm())
        if moved < _STILL:
            self._record(
                RateFallen(
                    step=low.since,
                    text=rates.name,
                    steps=low.steps,
                    of=of,
                    highest=max(rates.highest),
                    latest=max(rates.latest),
                    compared=began.step,
                    moved=moved,
                    by_metric=rates.by_metric,
                )
            )

    def _weights(self) -> Samples:
        living = self._optimizers.living()
        stepped = [each for optimizer in living for each in self._optimizers.parameters(optimizer)]
        trained = {
            each.name: each.parameter for each in (*stepped, *self._masters.weights()) if each.parameter.requires_grad
        }
        return samples(trained.items())

    def _see(self, step: int, steps: int, weights: Samples, given: tuple[Samples, ...], sent: Sent | None) -> None:
        has_gradient = any(bool(gradient.any()) for each in given for gradient in each.read().values())
        loss = None if sent is None else sent.read()[""]
        self._seen.append(_Seen(step, steps, weights.read(), loss, has_gradient))


def _are_trained(seen: Sequence[_Seen], fewest: int) -> bool:
    """Return whether at least so many steps had gradients."""
    return sum(each.has_gradient for each in seen) >= fewest


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same values; False for no values."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
