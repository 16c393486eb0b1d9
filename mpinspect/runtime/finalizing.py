"""Callbacks that are safe while the interpreter ends. Imports no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Callback = TypeVar("Callback", bound=Callable[..., Any])


def until_finalized(callback: Callback) -> Callback:
    """Wrap a callback that may be called at any time, so that it returns None at once when the interpreter is finalized.

    Needed by weakref callbacks, ``__del__``, functions patched into other modules and callbacks of ``os.register_at_fork``.
    At exit the interpreter clears the globals of all modules, in any order, before it frees the objects that they refer
    to. A callback may therefore find None instead of the names that its module imported.
    """
    is_finalizing = sys.is_finalizing

    @functools.wraps(callback)
    def run(*args: Any, **kwargs: Any) -> Any:
        return None if is_finalizing() else callback(*args, **kwargs)

    return run  # type: ignore[return-value]
