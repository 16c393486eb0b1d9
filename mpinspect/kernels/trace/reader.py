"""Read one or several trace files into KernelTrace: files, and folders with one file per rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np

from mpinspect.kernels.records import KernelTrace
from mpinspect.kernels.trace.attribution import attributed, external_id_is_correlation, find_launches
from mpinspect.kernels.trace.events import EventStream
from mpinspect.kernels.trace.notes import notes
from mpinspect.kernels.trace.provenance import busy_and_span, devices, job, rank_and_size
from mpinspect.kernels.trace.recording import Recording
from mpinspect.kernels.trace.text import TextChunks, TraceError, cannot_read
from mpinspect.kernels.trace.unreadable import no_phases, of_another
from mpinspect.runtime.garbage_collection import without_collection


def read_trace_file(path: str | PathLike[str]) -> KernelTrace:
    """Read a trace that torch.profiler exported: JSON, gzipped or not, regardless of the file's name.

    Takes about 100 bytes of memory per event. For a truncated or damaged file, returns the readable part; ``notes`` of the result
    names the missing parts.

    Raises:
        TraceError: the file does not exist, cannot be read, or is not a trace.
    """
    with without_collection():
        return _read(Path(path))


def _read(path: Path) -> KernelTrace:
    chunks = TextChunks(path)
    stream, recording = EventStream(chunks), Recording()
    for batch in stream.batches():
        recording.add(batch)
    accelerator = ""
    if not len(recording.kernels) and (other := recording.producer()) is not None:
        if not other.is_torch:
            raise TraceError(of_another(chunks, other))
        accelerator = other.name
    if stream.events and recording.without_phase == stream.events:
        raise TraceError(no_phases(chunks))
    launches = find_launches(recording)
    gpus = devices(recording, stream.top_level)
    wrong_ids = external_id_is_correlation(recording.kernels["correlation"], recording.kernels["external"])
    rank, world_size = rank_and_size(stream.top_level)
    busy_us, span_us = busy_and_span(recording)
    return KernelTrace(
        source=str(path),
        rank=rank,
        world_size=world_size,
        job=job(stream.top_level),
        devices=gpus,
        kernels=attributed(recording, launches),
        copies_us=float(recording.copies.duration.sum()),
        busy_us=busy_us,
        span_us=span_us,
        operators=len(recording.operators),
        launches=_launch_count(recording),
        notes=notes(stream, recording, launches, gpus, wrong_ids),
        cut_short=stream.is_cut,
        accelerator=accelerator,
    )


def _launch_count(recording: Recording) -> int:
    """Return the number of calls that start kernels; the recording also contains other calls, such as copies."""
    launching = [number for number, name in enumerate(recording.names) if "launch" in name.lower()]
    return int(np.isin(recording.launches["name"], launching).sum())


_SUFFIXES = (".json", ".json.gz")


def read_trace_files(paths: Sequence[str | PathLike[str]]) -> tuple[KernelTrace, ...]:
    """Read traces; each path is a file, or a folder whose .json and .json.gz files are the ranks of a run (no subfolders).

    The result is sorted by rank, then by name with numbers in numeric order ("worker10" after "worker2"). Files in a folder that
    are not traces are left out, and the first trace's ``notes`` name them.

    Raises:
        TraceError: a file cannot be read or is not a trace, a folder has no trace, or no path was given.
    """
    if isinstance(paths, (str, PathLike)):
        paths = [paths]
    if not paths:
        raise TraceError("No trace was given: name a file that torch.profiler exported, or a folder of them.")
    traces: list[KernelTrace] = []
    for path in map(Path, paths):
        if path.is_dir():
            traces.extend(_folder(path))
        else:
            traces.append(read_trace_file(path))
    traces.sort(key=lambda trace: (trace.rank is None, trace.rank or 0, _natural(trace.source)))
    claims = Counter(trace.rank for trace in traces)
    return tuple(_noted(trace, claims[trace.rank]) for trace in traces)


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
        found = "it has no .json or .json.gz file"
        if refused:
            found = f"its {len(refused)} JSON files are none ({refused[0][1]})"
        raise TraceError(f"{folder} holds no trace: {found}. Give the folder that tensorboard_trace_handler wrote to.")
    if refused:
        note = "Left out of the folder, since they are not traces: " + "; ".join(why for _, why in refused)
        traces[0] = replace(traces[0], notes=(*traces[0].notes, note))
    return traces


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _noted(trace: KernelTrace, claims: int) -> KernelTrace:
    """Add a note if several traces have this rank: they are from several runs, or from several windows of one run."""
    if trace.rank is None or claims == 1:
        return trace
    note = f"{claims} traces are of rank {trace.rank}: of several runs, or of several windows of one. All are counted."
    return replace(trace, notes=(*trace.notes, note))
