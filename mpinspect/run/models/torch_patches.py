"""Noticing that an optimizer is made, that it steps, that a backward begins: a few of torch's functions, replaced for a while.

The frames of these functions show in the tracebacks of errors that pass through them; whoever prints one takes them out again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from mpinspect.ranges.capture import optimizer_steps
from mpinspect.ranges.capture import scalers as scaler_watch
from mpinspect.run.models import owners
from mpinspect.runtime.hooks import ModelHook


class Listener(Protocol):
    """What is told. The methods must not raise."""

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's ``__init__`` has run, torch's own part of it at least."""

    def backward_begins(self, tensors: Any) -> None:
        """``torch.autograd.backward(tensors)`` is about to run."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` is about to run."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` has run."""

    def module_compiled(self, given: object) -> None:
        """``torch.compile(given)`` has run."""

    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """``scaler.scale(given)`` returned ``scaled``."""

    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is about to run."""

    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` has returned."""


class Noticing:
    """Tells ``listener`` from ``install`` to ``remove``."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._backward: tuple[Any, str, Any, Any] | None = None

    def install(self) -> None:
        """Begin."""
        self._replaced = [
            _replace(torch.optim.Optimizer, "__init__", self._noticed_optimizer),
            _replace(gc, "freeze", _remembered_modules),
            _replace(torch, "compile", self._noticed_compile),
            *(_replace(torch.jit, name, _without_our_hooks) for name in ("script", "trace", "trace_module")),
        ]
        self.watch_backwards(True)
        self.listen_last()

    def remove(self) -> None:
        """Leave torch as it was, but for what somebody else has replaced since."""
        optimizer_steps.unlisten(self._listener)
        scaler_watch.unlisten(self._listener)
        self.watch_backwards(False)
        while self._replaced:
            _put_back(self._replaced.pop())

    def watch_backwards(self, wanted: bool) -> None:
        """Whether backwards are told of: only while there is something to find, so that a settled run is left alone."""
        if wanted and self._backward is None:
            self._backward = _replace(torch.autograd, "backward", self._noticed_backward)
        elif not wanted and self._backward is not None:
            _put_back(self._backward)
            self._backward = None

    def listen_last(self) -> None:
        """Hear of steps, taken and skipped, after the inspectors have: to be called again when one was attached."""
        optimizer_steps.unlisten(self._listener)
        optimizer_steps.listen(self._listener)
        scaler_watch.unlisten(self._listener)
        scaler_watch.listen(self._listener)

    def _noticed_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._listener.optimizer_made(optimizer)

        return __init__

    def _noticed_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``module.compile()`` comes here too."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            given = args[0] if args else kwargs.get("model")
            if given is not None and not kwargs.get("disable", False):
                self._listener.module_compiled(given)
            return result

        return compile

    def _noticed_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._listener.backward_begins(args[0] if args else kwargs.get("tensors"))
            return original(*args, **kwargs)

        return backward


def _remembered_modules(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def freeze() -> None:
        with contextlib.suppress(Exception):
            owners.remember_before_freezing()
        original()

    return freeze


def _without_our_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    """TorchScript compiles a module's hooks along with it, or names values after their variables: not with ours."""

    @functools.wraps(original)
    def script(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next((kwargs[name] for name in ("obj", "func", "mod") if name in kwargs), None)
        model = getattr(given, "__self__", given)
        with _set_aside(model) if isinstance(model, torch.nn.Module) else contextlib.nullcontext():
            return original(*args, **kwargs)

    return script


@contextlib.contextmanager
def _set_aside(model: torch.nn.Module) -> Iterator[None]:
    tables: list[Any] = [
        hooks
        for module in owners.submodules(model)
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
