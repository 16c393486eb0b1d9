"""Which module an operator belongs to: in the forward by the calls that are running, in the backward by the autograd node."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr


def plain_path(path: str) -> str:
    """A dotted path without the steps that torch.compile's wrappers add."""
    return path if "_orig_mod" not in path else ".".join(step for step in path.split(".") if step != "_orig_mod")


class ModuleCalls:
    """The calls of a model's modules while they are followed.

    Autograd numbers its nodes in the order of their making (sequence numbers, one count a thread). The number at which each
    call began and ended tells, for any node, the innermost module whose forward made it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.paths = {id(module): plain_path(path) for path, module in model.named_modules()}
        self.types = {id(module): type(module).__name__ for module in model.modules()}
        self._modules = {id(module): module for module in model.modules()}
        self._root = id(model)
        self._running: list[int] = []
        self._numbers: list[int] = []
        self._owners: list[int] = []
        self._thread = threading.get_ident()
        self._failed: tuple[BaseException, str] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Hooks on every module within the block, around the user's own."""
        handles = []
        for module in self._modules.values():
            # What torch.compile's wrapper holds has hooks too; TorchScript's modules take none.
            if hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def current(self) -> int:
        """The innermost module that is running, by id; the model itself if none is."""
        return self._running[-1] if self._running else self._root

    @property
    def any_running(self) -> bool:
        """Whether a module's forward is running."""
        return bool(self._running)

    def of_node(self, number: int) -> int:
        """The module whose forward made the autograd node of this sequence number."""
        place = bisect_right(self._numbers, number) - 1
        return self._owners[place] if place >= 0 else self._root

    def module(self, key: int) -> torch.nn.Module:
        """The module by its id."""
        return self._modules[key]

    def where_failed(self, error: BaseException) -> str | None:
        """Dotted path of the innermost module that an exception left; None where it left none."""
        seen: BaseException | None = error
        while seen is not None:
            if self._failed is not None and self._failed[0] is seen:
                return self._failed[1]
            seen = seen.__cause__ or seen.__context__
        return None

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._running.append(id(module))
        self._mark()

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        error = sys.exc_info()[1]
        if error is not None and (self._failed is None or self._failed[0] is not error):
            self._failed = (error, self.paths[self._running[-1]])
        self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(_get_sequence_nr())
        self._owners.append(self._running[-1] if self._running else self._root)
