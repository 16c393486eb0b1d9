"""Callbacks that are safe while the interpreter ends. Imports no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Callback = TypeVar("Callback", bound=Callable[..., Any])


def until_finalized(callback: Callback) -> Callback:
    """Wrap a callback that others can call as long as they live: once the interpreter is finalized it returns None at once.

    Needed by weakref callbacks, ``__del__``, functions patched into other modules and callbacks of ``os.register_at_fork``. The
    interpreter clears the globals of modules while it ends, ours and torch's in any order, and drops objects last that any
    module refers to: so a callback may find None in place of what its module has imported.
    """
    is_finalizing = sys.is_finalizing

    @functools.wraps(callback)
    def run(*args: Any, **kwargs: Any) -> Any:
        return None if is_finalizing() else callback(*args, **kwargs)

    return run  # type: ignore[return-value]
