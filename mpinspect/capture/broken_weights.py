"""Whether a module's forward broke because its weights were broken already: looked at for the first events of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from mpinspect.capture.distributed import local_part
from mpinspect.capture.layers import WatchedParameter
from mpinspect.session import Event

#: Events whose module's weights are looked at, which waits for a GPU: what broke first is what matters.
_MOST_EVENTS_LOOKED_INTO = 3


class BrokenWeights:
    """Looks for weights that are not finite where a forward is not.

    Args:
        parameters: the model's.
    """

    def __init__(self, parameters: Collection[WatchedParameter]) -> None:
        self._parameters = parameters
        self._events = 0
        #: Those that were broken before this step's optimizer moved them; None where nobody looked.
        self._before_step: list[str] | None = None

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
            self._before_step = self._broken()

    def explain(self, event: Event, *, unmoved: bool) -> Event:
        """The event, its explanation naming a weight of the module that was not finite before the forward, if that is known.

        Args:
            event: of the forward.
            unmoved: whether no optimizer has moved the weights since that forward.
        """
        self._events += 1
        inside = f"{event.module}." if event.module else ""
        broken = self._before_step
        if broken is None and unmoved:
            broken = self._broken()
        name = next((name for name in broken or () if name.startswith(inside)), None)
        if name is None:
            return event
        reason = f"{name!r} itself is not finite: the optimizer's step before, or whoever set it, made it so"
        return replace(event, explanation=reason)

    def _broken(self) -> list[str]:
        return [watched.name for watched in self._parameters if _is_broken(local_part(watched.parameter).detach())]


def _is_broken(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and not bool(weight.isfinite().all())
