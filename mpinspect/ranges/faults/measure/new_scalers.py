"""Observers of scalers' calls, which read no tensor: new scalers, scales that change before they divide, unguarded steps."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.backward_scale import origin_of
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Backward
from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.runtime.guard import hides_modes
from mpinspect.runtime.storages import StorageReference, storage_key
from mpinspect.runtime.user_line import innermost_line

#: Number of steps with a new scaler before the first record, which does not wait for the run's end: it may be killed.
_MANY = 3
#: Maximum number of observed steps, since an active observer costs time at every call of a module.
_MOST_STEPS = 64


class NewScalers(Measuring):
    """Counts steps with a scaler, and steps with a new one. Works in the first sampled or watched steps; reads no tensor."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # A deleted scaler's id is soon reused.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_scaled = self._is_new = False
        self._seen = self._steps = self._new = self._first = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in the first steps whose losses are observed anyway."""
        self.at_work = (sampled or watched) and self._seen < _MOST_STEPS
        self._seen += self.at_work
        self._is_scaled = self._is_new = False

    def scaler_used(self, scaler: Any) -> None:
        """Remember whether this step uses an enabled scaler, and whether it uses one for the first time."""
        if scaler.is_enabled():
            self._is_scaled = True
            self._is_new |= scaler not in self._known
            self._known.add(scaler)

    def end_step(self, step: int, sampled: bool) -> None:
        """Count the step; record the counts once enough steps had a new scaler."""
        if not self._is_scaled:
            return
        if not self._steps:
            self._first = step
        self._steps += 1
        self._new += self._is_new
        if self._new == self._steps == _MANY:
            self._tell()

    def run_ends(self) -> None:
        """Record the counts of the run."""
        if self._new >= _MANY:
            self._tell()

    def _tell(self) -> None:
        self._record(records.NewScalers(step=self._first, new=self._new, steps=self._steps))


class ScalesUsed(Measuring):
    """Compares the scale by which a scaler divides each gradient with the scale that multiplied its loss."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: For each gradient, by parameter: its object and version after its last backward, and the origins of its terms.
        self._made: dict[str, tuple[tuple[int, int], set[tuple[int, int]]]] = {}
        self._divided: set[str] = set()
        self._origin: tuple[int, int] | None = None

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self.wants_backward_end = self._clock.measured

    def backward_begins(self, backward: Backward) -> None:
        """Forget the gradients that the loop has changed or cleared since their backward."""
        self._origin = backward.scale.origin
        states = self._states()
        self._made = {name: made for name, made in self._made.items() if states.get(name) == made[0]}

    def backward_ends(self) -> None:
        """Record the origin of the gradients that this backward has made or added to."""
        for name, state in self._states().items():
            before, origins = self._made.get(name, (None, set()))
            if state != before and self._origin is not None:
                self._made[name] = state, origins | {self._origin}
                self._divided.discard(name)

    def scaler_divides(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients whose loss was multiplied by another scale."""
        names = [watched.name for watched in self._optimizers.parameters(optimizer)]
        now, found = origin_of(scaler), {name: self._made[name][1] for name in names if name in self._made}
        other = [name for name, origins in found.items() if origins != {now}]
        if now is not None and other:
            self._record_names(
                records.DividedByAnother(
                    step=self._clock.step,
                    names=tuple(other),
                    of=len(found),
                    other_scaler=any(source != now[0] for source, _ in found[other[0]]),
                    repeated=other[0] in self._divided,
                )
            )
        self._divided.update(names)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the optimizer's gradients, which are used up."""
        if self._made or self._divided:
            for watched in self._optimizers.parameters(optimizer):
                self._made.pop(watched.name, None)
                self._divided.discard(watched.name)

    step_skipped = optimizer_stepped

    def _states(self) -> dict[str, tuple[int, int]]:
        if hides_modes():
            # Under a dispatch mode, foreach operators such as those of zero_grad raise no version.
            return {}
        gradients = ((watched.name, watched.parameter.grad) for watched in self._parameters)
        return {name: (id(gradient), gradient._version) for name, gradient in gradients if gradient is not None}


class BesideScaler(Measuring):
    """Finds optimizers that step outside of ``scaler.step``, on gradients that a scaler's step of theirs has had before."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        #: By optimizer: the step, whether it was skipped, a gradient's parameter and version, and its storage.
        self._had: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool, WatchedParameter, int, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step that no scaler runs, if the gradients are still those of a scaler's step."""
        had = self._had.pop(optimizer, None)
        if had is None or self._optimizers.is_guarded(optimizer):
            return
        step, skipped, watched, version, storage = had
        gradient = watched.parameter.grad
        # Another gradient may have got the memory of a freed one.
        if (
            is_plain(gradient)
            and not storage.expired()
            and (storage.key, version) == (storage_key(gradient), gradient._version)
        ):
            line = innermost_line(sys._getframe())
            self._record(records.SteppedBesideScaler(name=watched.name, step=step, text=line, skipped=skipped))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember a gradient that a scaler's step has used."""
        if self._optimizers.is_guarded(optimizer):
            self._remember(optimizer, skipped=False)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember a gradient whose step a scaler has skipped."""
        self._remember(optimizer, skipped=True)

    def _remember(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        # Under a dispatch mode, foreach operators such as those of zero_grad raise no version.
        held = (each for each in self._optimizers.parameters(optimizer) if is_plain(each.parameter.grad))
        first = self.at_work and not hides_modes() and next(held, None)
        if first and (gradient := first.parameter.grad) is not None:
            self._had[optimizer] = self._clock.step, skipped, first, gradient._version, StorageReference(gradient)
