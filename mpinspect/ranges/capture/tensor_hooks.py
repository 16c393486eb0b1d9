"""The hooks through which a model's calls and gradients reach the capture. Between samples each checks one flag."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.runtime.hooks import ModelHook

if TYPE_CHECKING:
    from mpinspect.ranges.capture.capture import Capture


class ForwardHook(ModelHook):
    """Sees one module's calls, with their keyword arguments."""

    __slots__ = ("_capture", "_layer")

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(layer.module, capture.forward_ran)
        self._capture = capture
        self._layer = layer

    def __call__(self, module: object, *args: Any) -> None:
        # torch.compile traces the first to nothing, so it comes before any state is read; the second is all that a module call
        # costs between samples.
        if is_compiling() or self._capture.quiet:
            return
        if id(module) == self._module_id:
            self._react(self._layer, *args)


class OutputGradientHook:
    """Waits on one output (or input) tensor for its gradient. Holds no tensor."""

    __torch_unserializable__ = True
    __slots__ = ("_capture", "_counted", "_is_input", "_layer", "_number")

    def __init__(self, capture: weakref.ref[Capture], layer: Layer, counted: bool, number: int, is_input: bool) -> None:
        # Weakly: a graph that outlives the inspector must not keep it.
        self._capture = capture
        self._layer = layer
        self._counted = counted
        self._number = number
        self._is_input = is_input

    def __call__(self, gradient: torch.Tensor) -> None:
        capture = self._capture()
        if capture is not None and capture.attached and gradient is not None:
            capture.activation_gradient(self._layer, gradient, self._counted, self._number, self._is_input)


class ParameterHook:
    """Sees the gradient that a backward brings to one parameter."""

    __torch_unserializable__ = True
    __slots__ = ("_capture", "_watched")

    def __init__(self, capture: Capture, watched: WatchedParameter) -> None:
        self._capture = capture
        self._watched = watched

    def __call__(self, gradient: torch.Tensor) -> None:
        capture = self._capture
        if capture.quiet or gradient is None:
            return
        # The usual case, made short: these come by the dozen, and each finds our code driven out of the caches.
        try:
            at_work = capture.meter is None and capture.waiting.task == torch._C._current_graph_task_id()
            if at_work and capture.waiting.hold(self._watched, gradient):
                return
        except Exception:
            # The guarded way meets the same trouble, and says so.
            pass
        capture.weight_gradient(self._watched, gradient)


class AccumulatedHook:
    """The same for parameters on which only post-accumulate hooks fire: it sees the sum over the micro-batches so far."""

    __slots__ = ("_capture", "_watched")

    def __init__(self, capture: Capture, watched: WatchedParameter) -> None:
        self._capture = capture
        self._watched = watched

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self._capture.quiet and parameter.grad is not None:
            self._capture.weight_gradient(self._watched, parameter.grad)
