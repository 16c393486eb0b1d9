"""One iteration under torch.profiler, written as the trace that torch writes for everybody: one reader reads them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from mpinspect.kernels.capture.module_ranges import ModuleRanges

#: Steps that run under the profiler before the one that is kept: its own start-up (CUPTI's) falls into them.
_SETTLING = 1


def record_trace(
    step: Callable[[], object], path: Path, *, model: nn.Module | None = None, warmup: int = 3
) -> tuple[str, ...]:
    """Run ``step`` ``warmup + 2`` times, the last one recorded into ``path`` (JSON). Waits for the GPU around that one.

    Returns:
        Notes: sentences on what the trace lacks.

    Raises:
        RuntimeError: another torch profiler is running.
        Exception: whatever ``step`` raises passes through; no hook and no profiler is left behind.
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
        return ("model= was given, and step called none of its modules: no kernel is its own",)
    return ()


def _record(step: Callable[[], object], path: Path, ranges: ModuleRanges) -> None:
    with profile(
        activities=activities(),
        schedule=_keep_the_last,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=True,
        acc_events=True,
    ) as profiler:
        for _ in range(_SETTLING):
            step()
            wait_for_gpu()
            profiler.step()
        ranges.settle()
        ranges.recording = True
        step()
        wait_for_gpu()
        ranges.recording = False
        profiler.step()


def _keep_the_last(number: int) -> ProfilerAction:
    if number < _SETTLING:
        return ProfilerAction.WARMUP
    return ProfilerAction.RECORD_AND_SAVE if number == _SETTLING else ProfilerAction.NONE


def activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if ProfilerActivity.CUDA in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        found.append(ProfilerActivity.CUDA)
    return found


def wait_for_gpu() -> None:
    """Wait for the GPU, so that a step's kernels end in its window."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
