"""Calls back when a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` once, right after the named module has been executed, or now if it is already loaded.

    The import is otherwise unchanged: same module, spec and loader. Exceptions raised by the callback are ignored.
    """
    if name in sys.modules:
        _call(callback)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder:
    """A finder that gets the module's spec from the other finders; first in ``sys.meta_path`` until the import."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap(spec)
                return spec
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        """Wrap ``exec_module`` of the spec's loader once, to call the callback after the module has been executed."""
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[union-attr]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _call(self._callback)

        # The loader of built-in modules accepts no attributes, but no module used here is built in.
        with contextlib.suppress(AttributeError, TypeError):
            loader.exec_module = execute_and_call  # type: ignore[union-attr, method-assign]


def _call(callback: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        callback()
