"""Temporarily wraps a few of torch's functions, to call a listener when an optimizer is made or a backward begins.

Optimizers' steps are reported by ``ranges/capture/optimizer_steps.py``, as for an inspector.

The wrappers' frames appear in the tracebacks of errors raised through them; ``run/script.py`` removes these frames from
printed tracebacks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.run.models import owners
from mpinspect.runtime.compiled_graphs import KEEPING
from mpinspect.runtime.finalizing import until_finalized
from mpinspect.runtime.hooks import ModelHook
from mpinspect.runtime.torch_calls import BACKWARD, COMPILED, GRADIENTS, INFERENCE_MODE
from mpinspect.runtime.wrappers import submodules

if TYPE_CHECKING:
    from mpinspect.run.watcher import Watcher


#: Functions that turn a module into a program; hooks would enter it, and torch 2.6 exports no module with hooks inside.
_TRACERS = (
    *((torch.jit, name) for name in ("script", "trace", "trace_module")),
    *((torch.export, name) for name in ("export", "export_for_training", "export_for_inference")),
)


class TorchPatches:
    """Calls the methods of ``listener`` from ``install`` to ``remove``."""

    def __init__(self, listener: Watcher) -> None:
        self._listener = listener
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._watches_backwards = False

    def install(self) -> None:
        """Wrap torch's functions and begin to call the listener."""
        self._replaced = [
            _replace(gc, "freeze", _remembered_modules),
            *(_replace(owner, name, self._without_our_hooks) for owner, name in _TRACERS if hasattr(owner, name)),
        ]
        COMPILED.listen(self._compiled, after=True)
        INFERENCE_MODE.listen(self._listener.inference_mode_changes)
        KEEPING.begin(self)
        self.watch_backwards(True)
        self.listen_last()

    def remove(self) -> None:
        """Stop calling the listener and restore torch's functions, except those that other code has replaced since."""
        optimizer_steps.unlisten(self._listener)
        scaler_watch.unlisten(self._listener)
        self.watch_backwards(False)
        self.watch_backwards_ends(False)
        COMPILED.unlisten(self._compiled)
        INFERENCE_MODE.unlisten(self._listener.inference_mode_changes)
        KEEPING.end(self)
        while self._replaced:
            _put_back(self._replaced.pop())

    def watch_backwards(self, wanted: bool) -> None:
        """Start or stop listening to calls of ``backward`` and ``grad``; listening only while needed avoids its cost later."""
        if wanted and not self._watches_backwards:
            BACKWARD.listen(self._listener.backward_begins)
            GRADIENTS.listen(self._listener.gradients_asked)
            GRADIENTS.listen(self._listener.gradients_returned, after=True)
        elif not wanted and self._watches_backwards:
            BACKWARD.unlisten(self._listener.backward_begins)
            GRADIENTS.unlisten(self._listener.gradients_asked)
            GRADIENTS.unlisten(self._listener.gradients_returned)
        self._watches_backwards = wanted

    def watch_backwards_ends(self, wanted: bool) -> None:
        """Start or stop listening to the ends of calls of ``backward``."""
        BACKWARD.unlisten(self._listener.backward_ended)
        if wanted:
            BACKWARD.listen(self._listener.backward_ended, after=True)

    def listen_last(self) -> None:
        """Move the listener behind the inspectors, so that it is called last; use after attaching an inspector."""
        optimizer_steps.unlisten(self._listener)
        optimizer_steps.listen(self._listener)
        scaler_watch.unlisten(self._listener)
        scaler_watch.listen(self._listener)

    def _compiled(self, given: Any, result: Any) -> None:
        # torch.compile returns its argument unchanged with ``disable=True`` or TORCHDYNAMO_DISABLE.
        if given is not None and result is not given:
            self._listener.module_compiled(given)

    def _without_our_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap one of ``_TRACERS`` so that our hooks are off the given module while it runs, until ``remove``."""

        @functools.wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            given = _given(args, kwargs, "obj", "func", "mod")
            model = getattr(given, "__self__", given)
            # torch's compiler wraps torch.jit.trace when it is first imported. This wrapper then stays in place after the run.
            aside = bool(self._replaced) and isinstance(model, torch.nn.Module)
            with _set_aside(model) if aside else contextlib.nullcontext():
                return original(*args, **kwargs)

        return trace


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> Any:
    """Return a call's first argument, passed by position or under one of these names; None if there is none."""
    return next(iter((*args, *(kwargs[name] for name in names if name in kwargs))), None)


def _remembered_modules(original: Callable[[], None]) -> Callable[[], None]:
    @until_finalized
    def remember() -> None:
        with contextlib.suppress(Exception):
            owners.remember_before_freezing()

    @functools.wraps(original)
    def freeze() -> None:
        remember()
        original()

    return freeze


@contextlib.contextmanager
def _set_aside(model: torch.nn.Module) -> Iterator[None]:
    tables: list[Any] = [
        hooks
        for module in submodules(model)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if any(isinstance(hook, ModelHook) for hook in hooks.values())
    ]
    before = [list(hooks.items()) for hooks in tables]
    for hooks, items in zip(tables, before, strict=True):
        for key, hook in items:
            if isinstance(hook, ModelHook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in zip(tables, before, strict=True):
            hooks.clear()
            hooks.update(items)


def _replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> tuple[Any, str, Any, Any]:
    original = getattr(owner, name)
    ours = wrapper(original)
    setattr(owner, name, ours)
    return owner, name, original, ours


def _put_back(replaced: tuple[Any, str, Any, Any]) -> None:
    owner, name, original, ours = replaced
    if getattr(owner, name) is ours:
        setattr(owner, name, original)
