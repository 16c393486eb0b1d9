"""Notifies listeners of gradient scalers' calls, by wrapping methods of torch's class while there are listeners.

GradScaler has no hooks, and a scaler made inside a function of the script can't be reached. So the methods are wrapped on
the class (and on subclasses that override them), once for all listeners, and restored afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class ScalerListener(Protocol):
    """The interface of listeners. Methods must not raise."""

    def loss_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        """Handle that ``scaler.scale(given)`` returned ``scaled``."""

    def scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``scaler.step(optimizer)`` is about to run."""

    def scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``scaler.step(optimizer)`` has returned."""

    def scaler_unscales(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``scaler.unscale_(optimizer)`` is about to run, called by the loop or by ``step``."""

    def scaler_unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Handle that ``scaler.unscale_(optimizer)`` has returned."""


_listeners: list[ScalerListener] = []
_originals: list[tuple[type, str, Any]] = []


def listen(listener: ScalerListener) -> None:
    """Notify ``listener`` of every scaler's calls from now on."""
    if not _listeners:
        for owner in _scaler_classes(torch.amp.GradScaler):
            _wrap(owner, "scale", _wrapped_scale)
            _wrap(owner, "step", _wrapped_step)
            _wrap(owner, "unscale_", _wrapped_unscale)
    _listeners.append(listener)


def unlisten(listener: ScalerListener) -> None:
    """Stop notifying ``listener``; restore torch's classes if it was the last listener."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        while _originals:
            owner, name, original = _originals.pop()
            setattr(owner, name, original)


def _scaler_classes(owner: type) -> Iterator[type]:
    yield owner
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        yield from _scaler_classes(subclass)


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    if name in vars(owner):
        original = vars(owner)[name]
        _originals.append((owner, name, original))
        setattr(owner, name, wrapper(original))


#: Scalers (by id) whose method is running: a subclass's call of super() must not be reported again.
_inside: set[tuple[int, str]] = set()


def _wrapped_scale(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        if (id(self), "scale") in _inside:
            return original(self, outputs)
        _inside.add((id(self), "scale"))
        try:
            scaled = original(self, outputs)
        finally:
            _inside.discard((id(self), "scale"))
        for listener in tuple(_listeners):
            listener.loss_scaled(self, outputs, scaled)
        return scaled

    return scale


def _wrapped_step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (id(self), "step") in _inside:
            return original(self, optimizer, *args, **kwargs)
        _inside.add((id(self), "step"))
        try:
            for listener in tuple(_listeners):
                listener.scaler_steps(self, optimizer)
            result = original(self, optimizer, *args, **kwargs)
        finally:
            _inside.discard((id(self), "step"))
        for listener in tuple(_listeners):
            listener.scaler_stepped(self, optimizer)
        return result

    return step


def _wrapped_unscale(original: Any) -> Any:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        if (id(self), "unscale_") in _inside:
            return original(self, optimizer)
        _inside.add((id(self), "unscale_"))
        try:
            for listener in tuple(_listeners):
                listener.scaler_unscales(self, optimizer)
            result = original(self, optimizer)
        finally:
            _inside.discard((id(self), "unscale_"))
        for listener in tuple(_listeners):
            listener.scaler_unscaled(self, optimizer)
        return result

    return unscale_
