"""What becomes of the weights in a run: whether they moved, and whether a forward broke because they are not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy

from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture.largest import extremes, from_extremes
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.kinds import WEIGHT
from mpinspect.ranges.session import END, Event, TensorKey
from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.guard import Unread

_State = tuple[int, list[float] | None]

#: Finite weights of this magnitude are no weights any more: an update has thrown them away.
_HUGE = 2.0**20
#: Events whose module's weights are read, which waits for a GPU: what broke first is what matters.
_MOST_EVENTS_EXPLAINED = 3


class WeightChanges:
    """Tells whether anything updated the weights, without waiting for a GPU.

    Args:
        parameters: the model's.
    """

    def __init__(self, parameters: Sequence[WatchedParameter]) -> None:
        self._parameters = parameters
        #: Each weight, with its state as the run began.
        self._first: list[tuple[torch.Tensor, _State]] = []
        self._last: _State | None = None

    def remember(self) -> None:
        """Note the weights as they are when the run begins."""
        weights = [watched.parameter for watched in self._parameters if can_be_hooked(watched.parameter)]
        self._first = [(weight, _state(weight)) for weight in weights]

    def moved(self) -> bool | None:
        """Return whether any weight has changed since ``remember``; None where that can't be known. Forgets the weights."""
        first, self._first = self._first, []
        if any(_state(weight) != was for weight, was in first):
            return True
        # Off a CPU ``weight.data -= ...`` leaves no trace that could be read without waiting.
        return False if all(values is not None for _, (_, values) in first) else None

    def updated(self) -> bool:
        """Return whether the weights changed, or their gradients went, since the last call."""
        first = next((watched.parameter for watched in self._parameters if can_be_hooked(watched.parameter)), None)
        if first is None:
            return True
        before, self._last = self._last, _state(first)
        return first.grad is None or self._last != before


def can_be_hooked(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can have a hook now: frozen ones, and lazy ones without a shape, can't."""
    return parameter.requires_grad and not is_lazy(parameter)


def _state(parameter: torch.Tensor) -> _State:
    """Return what changes when a loop without an optimizer updates a parameter: its version and, on a CPU, its first values.

    ``parameter.data -= ...`` changes the values and not the version.
    """
    try:
        local = detached_values(local_part(parameter))
    except Exception:
        # A subclass of Tensor that has no values at hand.
        return parameter._version, None
    has_values = local.device.type == "cpu" and local.layout is torch.strided
    return parameter._version, local.reshape(-1)[:4].tolist() if has_values else None


class BrokenWeights:
    """Looks for weights that are not finite where a forward is not.

    Args:
        parameters: the model's.
    """

    def __init__(self, parameters: Collection[WatchedParameter]) -> None:
        #: The weights that could not be read.
        self.unread = Unread[TensorKey]()
        self._parameters = parameters
        self._events = 0
        #: Largest magnitudes before this step's optimizer moved the weights; None where they were not read.
        self._before_step: dict[str, float] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether enough events were explained."""
        return self._events >= _MOST_EVENTS_EXPLAINED

    def begin_step(self) -> None:
        """Forget what the weights were."""
        self._before_step = None

    def read_before_step(self) -> None:
        """Read the weights before an optimizer steps on gradients of a broken forward, which breaks all. Waits for a GPU."""
        if self._before_step is None:
            self._before_step = self._magnitudes()

    def explain(self, event: Event, *, unmoved: bool) -> Event:
        """Return the event, its explanation naming a weight of the module that was not sound before the forward, if there is one.

        Args:
            event: of the forward.
            unmoved: whether no optimizer has moved the weights since that forward.
        """
        self._events += 1
        inside = f"{event.module}." if event.module else ""
        largest = self._before_step
        if largest is None and unmoved:
            largest = self._magnitudes()
        own = {name: value for name, value in (largest or {}).items() if name.startswith(inside)}
        broken = next((name for name, value in own.items() if not math.isfinite(value)), None)
        if broken is not None:
            reason = f"{broken!r} itself is not finite: the optimizer's step before, or whoever set it, made it so"
            return replace(event, explanation=reason)
        name = max(own, key=own.__getitem__, default="")
        if own.get(name, 0.0) < _HUGE:
            return event
        reason = f"{name!r} itself reaches {own[name]:.2g}: the optimizer's step before, or whoever set it, made it so"
        return replace(event, explanation=f"{event.explanation}; {reason}" if event.explanation else reason)

    def names(self) -> frozenset[str]:
        """Return the weights that are not finite now. Waits for a GPU."""
        return frozenset(name for name, value in self._magnitudes().items() if not math.isfinite(value))

    def left_behind(self, step: int, before: Collection[str]) -> Event | None:
        """Return the event of trained weights that are not finite as a run ends after ``step``, if any is not. Waits for a GPU.

        Args:
            before: names of those that were not when it began.
        """
        largest = self._magnitudes()
        trained = [watched for watched in self._parameters if watched.parameter.requires_grad]
        broken = [
            each for each in trained if not math.isfinite(largest.get(each.name, 0.0)) and each.name not in before
        ]
        if not broken:
            return None
        first = broken[0]
        kind = "nan" if math.isnan(largest[first.name]) else "inf"
        how_many = f"{len(broken)} of {len(trained)} parameters are not finite"
        return Event(step, 0, END, first.owner, WEIGHT, first.name, kind, explanation=how_many)

    def _magnitudes(self) -> dict[str, float]:
        """Return the largest magnitudes of the weights that can be read, by name."""
        magnitudes = {}
        for watched in self._parameters:
            with self.unread.left_out(TensorKey(watched.name, WEIGHT)):
                magnitudes[watched.name] = _magnitude(watched.parameter)
        return magnitudes


def _magnitude(parameter: torch.Tensor) -> float:
    """Return the largest |x|, or NaN; 0 where there is none to be had."""
    if is_lazy(parameter) or parameter.is_meta:
        return 0.0
    weight = detached_values(local_part(parameter))
    if not weight.numel() or not (weight.is_floating_point() or weight.is_complex()):
        return 0.0
    largest = largest_magnitude(weight)
    if largest is not None:
        return largest
    found = extremes(weight)
    return 0.0 if found is None else from_extremes(*(float(value) for value in found))
