"""The hooks through which a model's calls and gradients reach the dispatcher. Between samples each checks one flag.

Copies and pickles of a model leave them out. A hook lives in the module's own dictionaries, which ``pickle``, ``torch.save`` and
``copy.deepcopy`` take from ``Module.__getstate__``. That method is wrapped while anyone has hooks on, on each class that has its
own, and put back after.
"""

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
import functools
from collections.abc import Iterable


class ForwardHook(ModelHook):
    """Reports one module's calls, with their keyword arguments."""

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
    """Reports the gradient at one output (or input) tensor. Holds no tensor."""

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
    """Reports the gradient that a backward brings to one parameter."""

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
    """Does so where only post-accumulate hooks fire (distributed parameters): it sees the sum over the micro-batches so far."""

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


# -- copies and pickles ------------------------------------------------------------------------------------------------

#: A module's tables of hooks, and beside each those that hold facts about its hooks by the same keys.
_TABLES = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}

_users: list[object] = []
_originals: dict[type, Any] = {}
_MISSING = object()


def leave_hooks_out(user: object, modules: Iterable[torch.nn.Module]) -> None:
    """Keep every ModelHook out of pickles and copies of these modules, until ``user`` and all others have stopped that."""
    if not any(known is user for known in _users):
        _users.append(user)
    for kind in {_defining(type(module)) for module in modules}:
        if kind not in _originals:
            _originals[kind] = vars(kind).get("__getstate__", _MISSING)
            kind.__getstate__ = _without_our_hooks(kind.__getstate__)  # type: ignore[attr-defined]


def leave_hooks_in(user: object) -> None:
    """Stop that for a user without hooks; the last one leaves the classes as they were."""
    _users[:] = [known for known in _users if known is not user]
    if _users:
        return
    while _originals:
        kind, original = _originals.popitem()
        if original is _MISSING:
            del kind.__getstate__  # type: ignore[attr-defined]
        else:
            kind.__getstate__ = original  # type: ignore[attr-defined]


def _defining(kind: type) -> type:
    """Return the class whose ``__getstate__`` is called: one that has its own, else Module itself."""
    return next((base for base in kind.__mro__ if "__getstate__" in vars(base) and base is not object), torch.nn.Module)


def _without_our_hooks(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __getstate__(module: Any) -> Any:
        return _filtered(original(module))

    return __getstate__


def _filtered(state: Any) -> Any:
    """Return the state without our hooks; the very same object where there are none, or where it is not a module's usual dict."""
    if not isinstance(state, dict):
        return state
    changed = {}
    for table, beside in _TABLES.items():
        hooks = state.get(table)
        ours = {key for key, hook in hooks.items() if isinstance(hook, ModelHook)} if hooks else ()
        for name in (table, *beside) if ours else ():
            kept = state.get(name)
            if kept is not None:
                changed[name] = type(kept)((key, value) for key, value in kept.items() if key not in ours)
    return {**state, **changed} if changed else state
