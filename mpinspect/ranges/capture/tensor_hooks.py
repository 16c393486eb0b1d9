"""The hooks that report a model's calls and gradients to the dispatcher. In quiet steps each hook only checks one flag.

Copies and pickles of a model must not contain the hooks, which are stored in the module's dictionaries. ``pickle``,
``torch.save`` and ``copy.deepcopy`` get these from ``Module.__getstate__``, so this method is wrapped while hooks are installed,
on each class that defines it, and restored afterwards.

Each module has one forward hook, which registers a tensor hook on each output. torch's full backward hooks would make in-place
operations on the outputs raise an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from mpinspect.ranges.capture.layers import Layer, WatchedParameter
from mpinspect.runtime.hooks import ModelHook, compiler_is_off, in_compiled_call, not_compiled

if TYPE_CHECKING:
    from mpinspect.ranges.capture.dispatcher import Dispatcher


class ForwardHook(ModelHook):
    """Reports one module's calls, with their keyword arguments."""

    __slots__ = ("_dispatcher", "_layer")

    def __init__(self, dispatcher: Dispatcher, layer: Layer) -> None:
        super().__init__(layer.module, dispatcher.forward_ran)
        self._dispatcher = dispatcher
        self._layer = layer

    @not_compiled
    def __call__(self, module: object, *args: Any) -> None:
        # is_compiling() is checked first, so that torch.compile drops the hook before any state is read. In quiet steps a
        # module call costs only the check of the quiet flag.
        if is_compiling() or self._dispatcher.quiet:
            return
        if id(module) == self._module_id and (not in_compiled_call() or compiler_is_off()):
            self._react(self._layer, *args)


@dataclass(eq=False, slots=True)
class OutputGradientHook:
    """Reports the gradient at one output (or input) tensor, without holding a tensor."""

    __torch_unserializable__ = True
    # A weak reference, since an autograd graph may outlive the inspector.
    _dispatcher: weakref.ref[Dispatcher]
    _layer: Layer
    _counted: bool
    _number: int
    _is_input: bool

    def __call__(self, gradient: torch.Tensor) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is None or not dispatcher.attached or gradient is None:
            return
        waiting, args = dispatcher.waiting, (self._layer, gradient, self._counted, self._number, self._is_input)
        if not waiting.holds_outputs or not _is_held(dispatcher, waiting.hold_output, args):
            dispatcher.activation_gradient(*args)


@dataclass(eq=False, slots=True)
class ParameterHook:
    """Reports the gradient of one parameter in each backward."""

    __torch_unserializable__ = True
    _dispatcher: Dispatcher
    _watched: WatchedParameter

    def __call__(self, gradient: torch.Tensor) -> None:
        dispatcher = self._dispatcher
        if dispatcher.quiet or gradient is None or dispatcher.untaken == torch._C._current_graph_task_id():
            return
        args = self._watched, gradient
        if not _is_held(dispatcher, dispatcher.waiting.hold, args):
            dispatcher.weight_gradient(*args)


def _is_held(dispatcher: Dispatcher, hold: Callable[..., bool], args: tuple[Any, ...]) -> bool:
    """Return whether ``hold`` holds a gradient until the end of its backward.

    A fast path for the usual case: the hooks run dozens of times per backward, each time with cold caches.
    """
    if dispatcher.waiting.task != torch._C._current_graph_task_id() or dispatcher.met_modes:
        return False
    meter = dispatcher.meter
    if meter is not None:
        meter.begin()
    try:
        return hold(*args)
    except Exception:
        # The guarded call that follows raises the same error and reports it.
        return False
    finally:
        if meter is not None:
            meter.end()


@dataclass(eq=False, slots=True)
class AccumulatedHook:
    """Reports a distributed parameter's ``.grad``, the sum over micro-batches: only post-accumulate hooks fire there."""

    _dispatcher: Dispatcher
    _watched: WatchedParameter

    def __call__(self, parameter: torch.Tensor) -> None:
        if not self._dispatcher.quiet and parameter.grad is not None:
            self._dispatcher.weight_gradient(self._watched, parameter.grad)


def backward_ended(dispatcher: weakref.ref[Dispatcher], finish: Callable[[], None]) -> None:
    """Call ``finish`` through the dispatcher at the end of a backward, if the dispatcher still exists."""
    alive = dispatcher()
    if alive is not None:
        alive.backward_ended(finish)


# -- copies and pickles ------------------------------------------------------------------------------------------------

#: A module's tables of hooks, each with the tables that hold flags of these hooks under the same keys.
_TABLES = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}

_users: list[object] = []
_originals: dict[type, Any] = {}
_MISSING = object()


def leave_hooks_out(user: object, modules: Iterable[torch.nn.Module]) -> None:
    """Exclude every ModelHook from pickles and copies of these modules, until all users have called ``leave_hooks_in``."""
    if not any(known is user for known in _users):
        _users.append(user)
    for kind in {_defining(type(module)) for module in modules}:
        if kind not in _originals:
            _originals[kind] = vars(kind).get("__getstate__", _MISSING)
            kind.__getstate__ = _without_our_hooks(kind.__getstate__)  # type: ignore[attr-defined]


def leave_hooks_in(user: object) -> None:
    """Unregister a user of ``leave_hooks_out``; restore the classes if it was the last user."""
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
    """Return the class in the MRO that defines ``__getstate__`` (except object), or else Module."""
    return next((base for base in kind.__mro__ if "__getstate__" in vars(base) and base is not object), torch.nn.Module)


def _without_our_hooks(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __getstate__(module: Any) -> Any:
        return _filtered(original(module))

    return __getstate__


def _filtered(state: Any) -> Any:
    """Return the state without our hooks; the same object if it has no such hook, or is not the usual dict of a module."""
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
