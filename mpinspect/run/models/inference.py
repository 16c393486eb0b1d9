"""Finds the models of a script that runs them without a backward: the outermost modules that it calls before any training.

Global hooks see every module's call until a training begins, or until the script has called enough models.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mpinspect.ranges.capture.observations import tracing, transforms
from mpinspect.run.outcome import Seen
from mpinspect.runtime.guard import Guarded, guarded
from mpinspect.runtime.hooks import HandleList, in_compiled_call, not_compiled

#: The outermost calls after which no further model is searched for: a hook takes a microsecond or more at each call of a module.
_MOST_CALLS = 1000
_OF_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class OutermostCalls(Guarded):
    """Reports the modules with parameters or buffers that the script calls itself, before their forward runs.

    Args:
        called: called with each such module.
        seen: receives the notes.
    """

    def __init__(self, called: Callable[[torch.nn.Module], None], seen: Seen) -> None:
        super().__init__(seen.note)
        self._react = called
        self._handles = HandleList()
        self._filter: Any = None
        self._thread = threading.get_ident()
        #: The number of running modules, and of outermost calls so far.
        self._depth = self._calls = 0
        self._reported: Any = WeakIdKeyDictionary()
        #: Whether modules were called on other threads.
        self.any_elsewhere = False

    def begin(self) -> None:
        """Add the hooks, and filter torch's warning of them, as for a module that ``torch.compiler.disable`` has returned."""
        warnings.filterwarnings("ignore", _OF_GLOBAL_HOOKS, UserWarning)
        self._filter = warnings.filters[0]
        self._handles.add(global_hooks.register_module_forward_pre_hook(self._enter))
        self._handles.add(global_hooks.register_module_forward_hook(self._leave, always_call=True))

    def end(self) -> None:
        """Remove the hooks and the filter."""
        self._handles.remove_all()
        with contextlib.suppress(ValueError):
            # The script may have reset the filters.
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    @not_compiled
    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or in_compiled_call():
            return
        if threading.get_ident() != self._thread:
            self.any_elsewhere = True
            return
        self._depth += 1
        if self._depth == 1:
            self._outermost(module)

    @not_compiled
    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or in_compiled_call() or threading.get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        if not self._depth and self._calls >= _MOST_CALLS:
            self.end()

    @guarded
    def _outermost(self, module: torch.nn.Module) -> None:
        is_out_of_reach = (
            transforms() is not None or tracing() is not None or isinstance(module, torch.jit.ScriptModule)
        )
        if is_out_of_reach:
            return
        if module in self._reported or _has_values(module):
            self._reported[module] = True
            self._calls += 1
            self._react(module)


def _has_values(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters or buffers, and all of them values: lazy ones and those on meta have none."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and not any(is_lazy(each) or each.is_meta for each in tensors)
