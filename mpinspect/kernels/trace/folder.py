"""Several traces: files, and folders with one file a rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from mpinspect.kernels.records import KernelTrace
from mpinspect.kernels.trace.chunks import cannot_read
from mpinspect.kernels.trace.error import TraceError
from mpinspect.kernels.trace.reader import read_trace_file

_SUFFIXES = (".json", ".json.gz")


def read_trace_files(paths: Sequence[str | PathLike[str]]) -> tuple[KernelTrace, ...]:
    """Read traces: each path a file, or a folder whose .json and .json.gz files are the ranks of a run (subfolders aside).

    Sorted by rank, then by name as people count ("worker10" after "worker2"). Files of a folder that are no traces are left
    out, and the first trace's ``notes`` name them.

    Raises:
        TraceError: a file can't be read or is no trace, a folder has no trace, or no path was given.
    """
    if isinstance(paths, (str, PathLike)):
        paths = [paths]
    if not paths:
        raise TraceError("No trace was given: name a file that torch.profiler exported, or a folder of them.")
    traces: list[KernelTrace] = []
    for path in map(Path, paths):
        traces.extend(_folder(path) if path.is_dir() else [read_trace_file(path)])
    traces.sort(key=lambda trace: (trace.rank is None, trace.rank or 0, _natural(trace.source)))
    return tuple(_with_duplicates_noted(traces))


def _folder(folder: Path) -> list[KernelTrace]:
    try:
        files = sorted(file for file in folder.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())
    except OSError as error:
        raise TraceError(cannot_read(folder, error)) from error
    traces, refused = [], []
    for file in files:
        try:
            traces.append(read_trace_file(file))
        except TraceError as error:
            refused.append((file.name, str(error)))
    if not traces:
        first = f" ({refused[0][1]})" if refused else ""
        found = f"its {len(refused)} JSON files are none{first}" if refused else "it has no .json or .json.gz file"
        raise TraceError(f"{folder} holds no trace: {found}. Give the folder that tensorboard_trace_handler wrote to.")
    if refused:
        note = "Left out of the folder, since they are no traces: " + "; ".join(why for _, why in refused)
        traces[0] = replace(traces[0], notes=(*traces[0].notes, note))
    return traces


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _with_duplicates_noted(traces: list[KernelTrace]) -> list[KernelTrace]:
    """Ranks that several traces claim to be: two runs, or two windows of one."""
    counted = Counter(trace.rank for trace in traces if trace.rank is not None)
    return [_noted(trace, counted[trace.rank]) if trace.rank is not None else trace for trace in traces]


def _noted(trace: KernelTrace, claims: int) -> KernelTrace:
    if claims == 1:
        return trace
    note = f"{claims} traces are of rank {trace.rank}: of several runs, or of several windows of one. All are counted."
    return replace(trace, notes=(*trace.notes, note))
