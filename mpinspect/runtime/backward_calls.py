"""Listening to calls of backward: ``torch.autograd.backward`` is wrapped while anyone listens, and put back after.

``Tensor.backward`` looks it up when it is called. Where somebody else has wrapped it meanwhile, ours stays below, without effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: Given what backward was called for, before it begins. Must not raise.
Listener = Callable[[Any], None]

_listeners: list[Listener] = []
_wrapped: list[tuple[Any, Any]] = []


def listen(listener: Listener) -> None:
    """Call ``listener`` at every backward from now on, after those that listen already."""
    if not _wrapped:
        original = torch.autograd.backward
        ours = _telling(original)
        _wrapped.append((original, ours))
        torch.autograd.backward = ours
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop calling ``listener``; the last one leaves torch's function as it was."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _wrapped:
        original, ours = _wrapped[0]
        if torch.autograd.backward is ours:
            torch.autograd.backward = original
            _wrapped.clear()


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if _listeners and not torch.compiler.is_compiling():
            given = args[0] if args else kwargs.get("tensors")
            for listener in tuple(_listeners):
                listener(given)
        return original(*args, **kwargs)

    return backward
