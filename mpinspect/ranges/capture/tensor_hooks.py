"""The hooks through which a model's calls and gradients reach the dispatcher. Between samples each checks one flag."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.runtime.hooks import ModelHook

if TYPE_CHECKING:
    from mpinspect.ranges.capture.dispatcher import Dispatcher


class ForwardHook(ModelHook):
    """Sees one module's calls, with their keyword arguments."""

    __slots__ = ("_dispatcher", "_layer")

    def __init__(self, dispatcher: Dispatcher, layer: Layer) -> None:
        super().__init__(layer.module, dispatcher.forward_ran)
        self._dispatcher = dispatcher
        self._layer = layer

    def __call__(self, module: object, *args: Any) -> None:
        # torch.compile traces the first to nothing, so it comes before any state is read; the second is all that a module call
        # costs between samples.
        if is_compiling() or self._dispatcher.quiet:
            return
        if id(module) == self._module_id:
            self._react(self._layer, *args)


class OutputGradientHook:
    """Waits on one output (or input) tensor for its gradient. Holds no tensor."""

    __torch_unserializable__ = True
    __slots__ = ("_counted", "_dispatcher", "_is_input", "_layer", "_number")

    def __init__(
        self, dispatcher: weakref.ref[Dispatcher], layer: Layer, counted: bool, number: int, is_input: bool
    ) -> None:
        # Weakly: a graph that outlives the inspector must not keep it.
        self._dispatcher = dispatcher
        self._layer = layer
        self._counted = counted
        self._number = number
        self._is_input = is_input

    def __call__(self, gradient: torch.Tensor) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None and dispatcher.attached and gradient is not None:
            dispatcher.activation_gradient(self._layer, gradient, self._counted, self._number, self._is_input)


class ParameterHook:
    """Sees the gradient that a backward brings to one parameter."""

    __torch_unserializable__ = True
    __slots__ = ("_dispatcher", "_watched")

    def __init__(self, dispatcher: Dispatcher, watched: WatchedParameter) -> None:
        self._dispatcher = dispatcher
        self._watched = watched

    def __call__(self, gradient: torch.Tensor) -> None:
        dispatcher = self._dispatcher
        if dispatcher.quiet or gradient is None:
            return
        # The usual case, made short: these come by the dozen, and each finds our code driven out of the caches.
        try:
            at_work = dispatcher.meter is None and dispatcher.waiting.task == torch._C._current_graph_task_id()
            if at_work and dispatcher.waiting.hold(self._watched, gradient):
                return
        except Exception:
            # The guarded way meets the same trouble, and says so.
            pass
        dispatcher.weight_gradient(self._watched, gradient)


class AccumulatedHook:
    """The same for parameters on which only post-accumulate hooks fire: it sees the sum over the micro-batches so far."""

    __slots__ = ("_dispatcher", "_watched")

    def __init__(self, dispatcher: Dispatcher, watched: WatchedParameter) -> None:
        self._dispatcher = dispatcher
        self._watched = watched

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self._dispatcher.quiet and parameter.grad is not None:
            self._dispatcher.weight_gradient(self._watched, parameter.grad)


def backward_ended(dispatcher: weakref.ref[Dispatcher], finish: Callable[[], None]) -> None:
    """Have the dispatcher ``finish`` what waited for a backward's end."""
    alive = dispatcher()
    if alive is not None:
        alive.backward_ended(finish)
