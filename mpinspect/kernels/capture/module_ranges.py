"""Named ranges around module forwards, so that a profile tells which module launched a kernel.

torch.profiler writes class names only ("nn.Module: Linear_3"), and only with Python stacks, which cost more than the model. Here
every module call gets a range "mpinspect::module::<dotted path>". torch's own hooks for all modules are used: nothing is put
into the user's model, and nothing stays behind.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

#: What the trace reader looks for (trace_file); the path follows, "" is the model itself.
PREFIX = "mpinspect::module::"

#: Parts of a dotted path that wrappers add: torch.compile's, FSDP's and activation checkpointing's.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ModuleRanges:
    """Names modules and, while ``recording``, puts a range around each of their forwards.

    Without a model the modules called from outside any other are roots: the one with most parameters gives bare paths, the
    others (a loss, a discriminator) are led by their class name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.recording = False
        #: Whether a module of the given model was called while recording; True without a model.
        self.saw_model = model is None
        self._model = frozenset(map(id, model.modules())) if model is not None else frozenset()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[nn.Module] = []
        self._depth = 0
        #: Ranges of the modules that are running, None for those without one.
        self._open: list[Any] = []
        if model is not None:
            self._name(model, "")

    @contextmanager
    def installed(self) -> Iterator[ModuleRanges]:
        """While inside, every module call is seen. The hooks are gone afterwards, also after an exception."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with warnings.catch_warnings():
                # A compiled module's hooks fire for its wrapper too: both have the same path, so the range is the same.
                warnings.filterwarnings("ignore", message=".*when there are global hooks on modules.*")
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> None:
        """Name what was called so far: the roots' modules. Called after the warm-up, when all roots have been seen."""
        named = [root for root in self._roots if root not in self._paths]
        largest = max(named, key=_parameters, default=None) if not self._paths else None
        for root in sorted(named, key=lambda each: each is not largest):
            self._name(root, "" if root is largest else type(root).__name__)
        self._roots.clear()

    def path(self, module: nn.Module) -> str | None:
        """The dotted path of a module; None for one that was never seen."""
        return self._paths.get(module)

    def _name(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, *plain_parts(root, name)) if part)
            self._paths.setdefault(module, path)

    def _enter(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._depth == 0 and not any(root is module for root in self._roots):
            self._roots.append(module)
        self._depth += 1
        if self.recording:
            self._open.append(self._range(module))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or self._depth == 0:
            return
        self._depth -= 1
        opened = self._open.pop() if self._open else None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _range(self, module: nn.Module) -> Any:
        """An open range; None for a module of no root, such as the graph that torch.compile made of one."""
        path = self._paths.get(module)
        if path is None:
            return None
        self.saw_model = self.saw_model or id(module) in self._model
        opened = torch.profiler.record_function(PREFIX + path)
        opened.__enter__()  # type: ignore[no-untyped-call]
        return opened


def plain_parts(root: nn.Module, name: str) -> list[str]:
    """A module's name in parts, without what wrappers add: "module._orig_mod.fc" of a DistributedDataParallel -> ["fc"]."""
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    wraps = isinstance(root, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return parts[1:] if wraps and parts[:1] == ["module"] else parts


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
