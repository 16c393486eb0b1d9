"""An observer of weights that no longer change while their optimizer steps, of the loss in these steps, and of zero rates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mpinspect.ranges.capture.optimizers import stands_still
from mpinspect.ranges.faults.measure.masters import Samples, samples
from mpinspect.ranges.faults.measure.measuring import Measuring, Run, Sent
from mpinspect.ranges.records import RateZero, Standstill

#: Minimum number of steps with a learning rate other than 0 in which the weights must stay the same, and of measured steps among
#: them with a gradient: rows of a table that no sample uses stay the same, too.
_FEWEST_STEPS, _FEWEST_GRADIENTS = 8, 2


class _Seen(NamedTuple):
    """A few elements of the weights at the end of a step, and the optimizers' steps until then."""

    step: int
    steps: int
    weights: dict[str, torch.Tensor]


@dataclass
class _Rates:
    """An optimizer's steps; ``still``: those up to the last one with a learning rate of 0, from step ``since`` on."""

    name: str
    steps: int = 0
    still: int = 0
    since: int = 0


class StandingStill(Measuring):
    """Compares a few elements of FP32 weights at the ends of measured steps and of the run; never waits during the run.

    Weights in 16 bits are left out: updates of their masters may add up before one shows.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = 0
        #: By the optimizer's id; if Python reuses the id, the steps of both optimizers count as one's.
        self._rates: dict[int, _Rates] = {}
        self._loss: Sent | None = None
        self._given: list[Samples] = []
        #: The first step since which the weights are the same, and the losses of the measured steps after it.
        self._since: _Seen | None = None
        self._losses: list[float] = []
        #: The measured steps after it in which an element that was read had a gradient.
        self._gradients = 0

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
        is_still = stands_still(optimizer)
        self._steps += not is_still
        rates = self._rates.setdefault(id(optimizer), _Rates(type(optimizer).__name__))
        if is_still and not rates.still:
            rates.since = self._clock.step
        rates.steps, rates.still = rates.steps + 1, is_still * (rates.still + 1)
        if self.at_work:
            parameters = self._optimizers.parameters(optimizer)
            self._given.append(samples((each.name, each.parameter.grad) for each in parameters))

    def end_step(self, step: int, sampled: bool) -> None:
        """Send a few elements of each weight to the host, to be compared with those of the last measured step."""
        super().end_step(step, sampled)
        if self.at_work:
            weights, given, loss = self._weights(), tuple(self._given), self._loss
            copies = [copy for each in (weights, *given) for copy in each.copies]
            copies += loss.copies if loss is not None else ()
            self._arrivals.call(copies, partial(self._compare, step, self._steps, weights, given, loss))

    def run_ends(self) -> None:
        """Record zero learning rates, and the weights that are the same at the run's end as at the end of an earlier step."""
        super().run_ends()
        for each in self._rates.values():
            if each.still >= _FEWEST_STEPS:
                self._record(RateZero(step=each.since, text=each.name, steps=each.still, of=each.steps))
        since = self._since
        if since is None or self._gradients < _FEWEST_GRADIENTS or self._steps - since.steps < _FEWEST_STEPS:
            return
        # The optimizers may be gone.
        weights = samples((each.name, each.parameter) for each in self._parameters if each.name in since.weights)
        if _are_equal(since.weights, weights.read()):
            losses, steps = self._losses, self._steps - since.steps
            loss = losses[0] if len(set(losses)) == 1 else None
            self._record(Standstill(step=since.step, steps=steps, losses=len(losses), loss=loss))

    def _weights(self) -> Samples:
        stepped = {
            each.name: each.parameter
            for optimizer in self._optimizers.living()
            for each in self._optimizers.parameters(optimizer)
            if each.parameter.requires_grad
        }
        is_wide = all(parameter.dtype is torch.float32 for parameter in stepped.values())
        return samples(stepped.items() if is_wide else ())

    def _compare(self, step: int, steps: int, weights: Samples, given: tuple[Samples, ...], sent: Sent | None) -> None:
        seen = _Seen(step, steps, weights.read())
        if self._since is None or not _are_equal(self._since.weights, seen.weights):
            self._since, self._losses, self._gradients = seen, [], 0
            return
        self._gradients += any(bool(gradient.any()) for each in given for gradient in each.read().values())
        if sent is not None:
            self._losses.append(sent.read()[""])


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same values; False for no values."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
