"""Record one iteration with torch.profiler as an ordinary trace, with named ranges around module forwards.

torch.profiler writes only class names ("nn.Module: Linear_3"), and only with Python stacks, which cost more time than the
model. Here torch's global module hooks open a range "mpinspect::module::<dotted path>" around every module call, so the
user's model is unchanged, and no hook remains afterwards.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, schedule

from mpinspect.kernels.records import MODULE_RANGE

#: Parts of a dotted path that wrappers add: torch.compile, FSDP and activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ModuleRanges:
    """Name modules and, while ``recording``, open a range around each of their forwards.

    Without a model, modules called from outside any other module are roots. Paths begin at the root with the most parameters;
    paths within other roots (a loss, a discriminator) begin with the root's class name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.recording = False
        #: Whether a module of the given model was called while recording; True without a model.
        self.saw_model = model is None
        self._model: frozenset[int] = frozenset()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[nn.Module] = []
        self._depth = 0
        #: Ranges of the running modules; None for a module without a range.
        self._open: list[Any] = []
        if model is not None:
            self._model = frozenset(map(id, model.modules()))
            self._name(model, "")

    @contextmanager
    def installed(self) -> Iterator[ModuleRanges]:
        """Hook all module calls within the context; remove the hooks when it ends, also after an exception."""
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
        """Name the modules of the roots called so far. Call this after the warm-up, when all roots have been called."""
        named = [root for root in self._roots if root not in self._paths]
        if named and not self._paths:
            largest = max(named, key=_parameters)
            named.remove(largest)
            self._name(largest, "")
        for root in named:
            self._name(root, type(root).__name__)
        self._roots.clear()

    def path(self, module: nn.Module) -> str | None:
        """Return the dotted path of a module; None for a module outside all roots."""
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
        if self._open and (opened := self._open.pop()) is not None:
            opened.__exit__(None, None, None)

    def _range(self, module: nn.Module) -> Any:
        """Return an open range; None for a module outside all roots, such as a graph made by torch.compile."""
        path = self._paths.get(module)
        if path is None:
            return None
        self.saw_model = self.saw_model or id(module) in self._model
        return opened_range(path)


def opened_range(path: str) -> Any:
    """Open the range of a module's forward; close it with ``__exit__``."""
    opened = torch.profiler.record_function(MODULE_RANGE + path)
    opened.__enter__()  # type: ignore[no-untyped-call]
    return opened


def plain_parts(root: nn.Module, name: str) -> list[str]:
    """Split a module's name, dropping wrappers' parts: "module._orig_mod.fc" of a DistributedDataParallel gives ["fc"]."""
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    if isinstance(root, nn.DataParallel | nn.parallel.DistributedDataParallel) and parts[:1] == ["module"]:
        return parts[1:]
    return parts


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def record_trace(
    step: Callable[[], object], path: Path, *, model: nn.Module | None = None, warmup: int = 3
) -> tuple[str, ...]:
    """Run ``step`` ``warmup + 2`` times and record the last run to ``path`` (JSON). Waits for the GPU before and after it.

    Returns:
        Notes: sentences on missing parts of the trace.

    Raises:
        RuntimeError: another torch profiler is running.
        Exception: exceptions of ``step`` pass through; no hook and no profiler is left behind.
    """
    # A second profiler would silently end the first one's recording.
    if torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError(
            "another torch profiler is running, and torch records for one at a time: call profile_kernels outside of it, or give "
            "the trace that it writes to read_trace"
        )
    ranges = ModuleRanges(model)
    with ranges.installed():
        for _ in range(warmup):
            step()
        wait_for_gpu()
        _record(step, path, ranges)
    if not ranges.saw_model:
        return ("model= was given, and step called none of its modules: no kernel is attributed to it",)
    return ()


def _record(step: Callable[[], object], path: Path, ranges: ModuleRanges) -> None:
    with two_step_profiler(lambda done: done.export_chrome_trace(str(path))) as profiler:
        step()
        wait_for_gpu()
        profiler.step()
        ranges.settle()
        ranges.recording = True
        step()
        wait_for_gpu()
        ranges.recording = False
        profiler.step()


def two_step_profiler(on_trace_ready: Callable[[profile], Any] | None = None) -> profile:
    """Return a profiler that records the second of two steps: the first contains the start-up of the profiler (CUPTI)."""
    activities = [ProfilerActivity.CPU]
    if ProfilerActivity.CUDA in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=on_trace_ready,
        record_shapes=True,
        acc_events=True,
    )


def wait_for_gpu() -> None:
    """Wait for the GPU, so that a step's kernels end in its window."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
