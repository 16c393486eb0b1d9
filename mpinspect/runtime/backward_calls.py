"""Calls listeners at each backward, by wrapping ``torch.autograd.backward`` as long as there are listeners.

``Tensor.backward`` looks this function up at each call. If other code has wrapped it in the meantime, our wrapper stays
in place without effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: Called with the tensors passed to backward, before it begins; must not raise.
Listener = Callable[[Any], None]

_listeners: list[Listener] = []
_wrapped: list[tuple[Any, Any]] = []


def listen(listener: Listener) -> None:
    """Call ``listener`` at every backward from now on, after the listeners already registered."""
    if not _wrapped:
        original = torch.autograd.backward
        ours = _telling(original)
        _wrapped.append((original, ours))
        torch.autograd.backward = ours
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop calling ``listener``, and restore torch's function if no listener is left."""
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
