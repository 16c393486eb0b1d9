"""Being told when a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call back right after the module of that name has been executed, once; at once if it is there already.

    The module, its spec and its loader are the ones they would be. A fault in the callback does not reach the import.
    """
    if name in sys.modules:
        _tell(callback)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder:
    """Stands before the finders until the module has come, and lets them find it."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._listen(spec)
                return spec
        return None

    def _listen(self, spec: ModuleSpec) -> None:
        """Have this one loader tell when it has executed the module."""
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def execute_and_tell(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[union-attr]
            execute(module)
            self._arrived()

        # A loader that takes no attributes is one that serves every module (built-in ones): nothing of interest here.
        with contextlib.suppress(AttributeError, TypeError):
            loader.exec_module = execute_and_tell  # type: ignore[union-attr, method-assign]

    def _arrived(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _tell(self._callback)


def _tell(callback: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        callback()
