"""profile_kernels() and read_trace(): record or read traces, and analyse them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mpinspect.kernels.analysis import KernelReport, analyse_kernels
from mpinspect.kernels.trace import read_trace_file, read_trace_files
from mpinspect.runtime import gpus

if TYPE_CHECKING:
    from torch import nn

    from mpinspect.runtime.gpus import Gpu
    from mpinspect.shapes.analysis import ShapeReport


def profile_kernels(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    warmup: int = 3,
    gpu: str | None = None,
    shapes: ShapeReport | None = None,
    trace: str | PathLike[str] | None = None,
) -> KernelReport:
    """Run one training iteration under torch.profiler and report which of its kernels ran on Tensor Cores.

    Args:
        step: runs one iteration (forward, backward, optimizer); called ``warmup + 2`` times, with the last call recorded.
        model: the model whose dotted paths the report uses. None: the largest of the root modules that ``step`` calls.
        warmup: number of earlier iterations, during which libraries choose their kernels and torch.compile compiles.
        gpu: an architecture or card whose rates and rules to use; None: the GPU that ran the step.
        shapes: lint_shapes' report of the model; its causes are added to the causes of slow kernels.
        trace: where to save torch.profiler's trace (.json or .json.gz); None: the trace is not saved.

    Returns:
        The report. Without a GPU it has no kernels, and a finding on the missing GPU activity.

    Synchronises the GPU before and after the recorded iteration. Recording takes time: kernel durations stay the same, but the
    gaps between kernels are longer.

    Raises:
        TypeError: ``step`` cannot be called, or ``model`` or ``shapes`` is of another type.
        ValueError: ``warmup`` is negative, or no GPU of that name is known.
        OSError: ``trace`` cannot be written; raised before ``step`` is called.
        RuntimeError: another torch profiler is running.
        Exception: exceptions of ``step`` pass through.
    """
    from mpinspect.kernels.capture.profiling import record_trace

    _check(step, model, warmup, shapes)
    chosen = _gpu(gpu)
    with tempfile.TemporaryDirectory(prefix="mpinspect-") as folder:
        # Absolute, since ``step`` may change the working directory.
        path = Path(trace if trace is not None else Path(folder) / "trace.json").absolute()
        _ensure_writable(path)
        notes = record_trace(step, path, model=model, warmup=warmup)
        found = read_trace_file(path)
    return analyse_kernels([replace(found, notes=(*found.notes, *notes))], chosen, shapes)


def read_trace(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    gpu: str | None = None,
    shapes: ShapeReport | None = None,
) -> KernelReport:
    """Read traces of torch.profiler from any machine and report which kernels ran on Tensor Cores. Needs no GPU and no torch.

    Args:
        path: a trace (.json, .json.gz), a folder with one trace per rank, or a sequence of these.
        gpu: an architecture or card, for traces that do not describe their GPU; None: the GPU described in the trace.
        shapes: lint_shapes' report of the model; its causes are added to the causes of slow kernels.

    Raises:
        TraceError: (a ValueError) a path cannot be read, is not a trace, or is a folder without one; the message names it.
        ValueError: no GPU of that name is known.
    """
    if not isinstance(path, str | PathLike | Sequence):
        raise TypeError(f"path must be a trace's path, a folder or a list of them, not {type(path).__name__}")
    paths = [path] if isinstance(path, str | PathLike) else list(path)
    chosen = _gpu(gpu)
    return analyse_kernels(read_trace_files(paths), chosen, shapes)


def _gpu(name: str | None) -> Gpu | None:
    if name is None or name.strip().lower() == "auto":
        return None
    return gpus.named(name)


def _check(step: object, model: object, warmup: int, shapes: object) -> None:
    from torch import nn

    from mpinspect.shapes.analysis import ShapeReport

    if not callable(step):
        raise TypeError(
            f"step must be a function without arguments that runs one training iteration, not {type(step).__name__}: "
            "wrap the iteration, profile_kernels(lambda: train_one(batch))"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be the torch.nn.Module that step trains, or None, not {type(model).__name__}")
    if shapes is not None and not isinstance(shapes, ShapeReport):
        raise TypeError(f"shapes must be what lint_shapes returns, or None, not {type(shapes).__name__}")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: the number of iterations before the recorded one can't be negative")


def _ensure_writable(path: Path) -> None:
    """Raise OSError before the run if its trace could not be written; create parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        path.unlink()
