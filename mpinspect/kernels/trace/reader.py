"""One trace file to KernelTrace."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np

from mpinspect.kernels.records import KernelTrace
from mpinspect.kernels.trace import refusals, top_level
from mpinspect.kernels.trace.attribution import attributed
from mpinspect.kernels.trace.chunks import CHUNK_BYTES, TextChunks
from mpinspect.kernels.trace.devices import busy_and_span, devices
from mpinspect.kernels.trace.error import TraceError
from mpinspect.kernels.trace.events import EventStream
from mpinspect.kernels.trace.launches import external_id_is_correlation, find_launches
from mpinspect.kernels.trace.notes import notes
from mpinspect.kernels.trace.recording import Recording
from mpinspect.runtime.garbage_collection import without_collection


def read_trace_file(path: str | PathLike[str], *, chunk_bytes: int = CHUNK_BYTES) -> KernelTrace:
    """Read a trace that torch.profiler exported: .json or .json.gz (told by the content, not by the name).

    Memory is bounded by what attribution needs, about 100 bytes an event, not by the file. Cut or damaged files give what
    could be read; ``notes`` of the result says what is missing.

    Args:
        path: of the file.
        chunk_bytes: how much of it is read at a time.

    Raises:
        TraceError: there is no such file, it can't be read, or it is no trace.
    """
    with without_collection():
        return _read(Path(path), chunk_bytes)


def _read(path: Path, chunk_bytes: int) -> KernelTrace:
    chunks = TextChunks(path, chunk_bytes)
    stream, recording = EventStream(chunks), Recording()
    for batch in stream.batches():
        recording.add(batch)
    if stream.events and recording.without_phase == stream.events:
        raise TraceError(refusals.no_phases(chunks))
    launches = find_launches(recording)
    gpus = devices(recording, stream.top_level)
    wrong_ids = external_id_is_correlation(recording.kernels["correlation"], recording.kernels["external"])
    rank, world_size = top_level.rank_and_size(stream.top_level)
    busy_us, span_us = busy_and_span(recording)
    return KernelTrace(
        source=str(path),
        rank=rank,
        world_size=world_size,
        job=top_level.job(stream.top_level),
        devices=gpus,
        kernels=attributed(recording, launches),
        copies_us=float(recording.copies.duration.sum()),
        window_us=_window(recording),
        busy_us=busy_us,
        span_us=span_us,
        operators=len(recording.operators),
        has_shapes=recording.has_shapes,
        has_strides=recording.has_strides,
        launches=_launch_count(recording),
        external_id_is_correlation=wrong_ids,
        notes=notes(stream, recording, launches, gpus, wrong_ids),
        cut_short=stream.is_cut,
    )


def _window(recording: Recording) -> tuple[float, float]:
    """From the first to the last thing recorded, the profiler's own marks among them; (0, 0) if there is nothing."""
    columns = (recording.operators, recording.launches, recording.kernels, recording.copies, recording.modules)
    starts = [recording.window[0], *(float(column.start.min()) for column in columns if len(column))]
    ends = [recording.window[1], *(float(column.end.max()) for column in columns if len(column))]
    return (min(starts), max(ends)) if min(starts) <= max(ends) else (0.0, 0.0)


def _launch_count(recording: Recording) -> int:
    """Calls that start kernels; the recording has others too (copies), whose correlation it needs as little as theirs."""
    launching = [number for number, name in enumerate(recording.names) if "launch" in name.lower()]
    return int(np.isin(recording.launches["name"], launching).sum())
