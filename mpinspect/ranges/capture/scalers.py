"""Notifies listeners of gradient scalers' calls, by wrapping methods of torch's class while there are listeners.

GradScaler has no hooks, and a scaler made inside a function of the script can't be reached. So the methods are wrapped on
the class (and on subclasses that override them), once for all listeners, and restored afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
            for name in vars(owner).keys() & _METHODS.keys():
                original = vars(owner)[name]
                _originals.append((owner, name, original))
                setattr(owner, name, _wrapped(original, name))
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


#: By method: its argument, and the names of the listeners' methods that are called before ("": none) and after it.
_METHODS = {
    "scale": ("outputs", "", "loss_scaled"),
    "step": ("optimizer", "scaler_steps", "scaler_stepped"),
    "unscale_": ("optimizer", "scaler_unscales", "scaler_unscaled"),
}
#: Scalers (by id) whose method is running: a subclass's call of super() must not be reported again.
_inside: set[tuple[int, str]] = set()


#: By method: the stages of an optimizer, since the last ``update()``, in which torch raises an error.
_REFUSED_IN = {"step": ("STEPPED",), "unscale_": ("UNSCALED", "STEPPED")}


def _is_refused(scaler: Any, name: str, given: Any) -> bool:
    """Return whether a scaler will raise an error for its optimizer's stage, so that the call changes no gradient."""
    stage = getattr(scaler, "_per_optimizer_states", {}).get(id(given), {}).get("stage")
    return getattr(stage, "name", "") in _REFUSED_IN.get(name, ())


def _wrapped(original: Any, name: str) -> Any:
    """Return a method of a scaler that calls the original one and the listeners."""
    argument, before, after = _METHODS[name]

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = next(iter(args), kwargs.get(argument))
        if (id(self), name) in _inside or _is_refused(self, name, given):
            return original(self, *args, **kwargs)
        _inside.add((id(self), name))
        try:
            for listener in tuple(_listeners) if before else ():
                getattr(listener, before)(self, given)
            result = original(self, *args, **kwargs)
        finally:
            _inside.discard((id(self), name))
        for listener in tuple(_listeners):
            getattr(listener, after)(self, given, *((result,) if name == "scale" else ()))
        return result

    return run
