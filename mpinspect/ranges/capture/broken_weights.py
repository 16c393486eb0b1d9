"""Whether a module's forward broke because of its weights: looked at for the first events of a run, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy

from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.watch import extremes, from_extremes
from mpinspect.ranges.kinds import WEIGHT
from mpinspect.ranges.session import END, Event, TensorKey
from mpinspect.runtime.distributed import local_part
from mpinspect.runtime.guard import Unread

#: Finite weights of this magnitude are no weights any more: an update has thrown them away.
_HUGE = 2.0**20
#: Events whose module's weights are looked at, which waits for a GPU: what broke first is what matters.
_MOST_EVENTS_LOOKED_INTO = 3


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
        #: Largest magnitudes before this step's optimizer moved the weights; None where nobody looked.
        self._before_step: dict[str, float] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether enough events were looked into."""
        return self._events >= _MOST_EVENTS_LOOKED_INTO

    def begin_step(self) -> None:
        """What is known of the weights is over."""
        self._before_step = None

    def look_before_step(self) -> None:
        """The forward broke, and an optimizer is about to step: on such gradients that breaks every weight. Waits for a GPU."""
        if self._before_step is None:
            self._before_step = self._magnitudes()

    def explain(self, event: Event, *, unmoved: bool) -> Event:
        """The event, its explanation naming a weight of the module that was not sound before the forward, if that is known.

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
        """Those that are not finite now. Waits for a GPU."""
        return frozenset(name for name, value in self._magnitudes().items() if not math.isfinite(value))

    def left_behind(self, step: int, before: Collection[str]) -> Event | None:
        """What tells of trained weights that are not finite as a run ends after ``step``; None where all are. Waits for a GPU.

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
        """Of the weights that can be read, by name."""
        magnitudes = {}
        for watched in self._parameters:
            with self.unread.left_out(TensorKey(watched.name, WEIGHT)):
                magnitudes[watched.name] = _magnitude(watched.parameter)
        return magnitudes


def _magnitude(parameter: torch.Tensor) -> float:
    """The largest |x|, or NaN; 0 where there is none to be had."""
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
