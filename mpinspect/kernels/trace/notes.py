"""Word the sentences on files that are not traces, on truncated files, and on data missing from a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpinspect.kernels.trace.producers import producer
from mpinspect.reporting.words import filled

if TYPE_CHECKING:
    from mpinspect.kernels.records import Device
    from mpinspect.kernels.trace.attribution import Launches
    from mpinspect.kernels.trace.events import EventStream
    from mpinspect.kernels.trace.producers import Producer
    from mpinspect.kernels.trace.recording import Recording
    from mpinspect.kernels.trace.text import TextChunks

_EXPORTED = "the .json or .json.gz that torch.profiler's export_chrome_trace or tensorboard_trace_handler wrote"

#: Maximum number of a file's first characters that a sentence quotes.
_MOST_QUOTED = 20

#: The first characters of other kinds of files.
_KINDS = {"PK\x03\x04": "a ZIP archive", "SQLite": "an SQLite database (Nsight's?)", "<": "HTML or XML"}


def of_another(source: TextChunks, found: Producer) -> str:
    """Return the sentence for a trace of another profiler."""
    return f"{source.path} is a trace {found.name}: {found.can_be_read}. Give {_EXPORTED}."


def no_json(source: TextChunks, beginning: str) -> str:
    """Return the sentence for a file that is not JSON. ``beginning``: its first characters after white space."""
    if found := producer([beginning, source.path.name]):
        return of_another(source, found)
    beginning = beginning[:_MOST_QUOTED]
    if not beginning:
        if source.problem:
            return f"{source.path} can't be read: {source.problem}. Copy or export it again."
        return (
            f"{source.path} is empty: the program was stopped before the profiler exported its trace. Export it again."
        )
    kind = next((f" but {kind}" for start, kind in _KINDS.items() if beginning.startswith(start)), "")
    return f"{source.path} is not JSON{kind}: it begins with {beginning!r}. Give {_EXPORTED}."


def no_trace(source: TextChunks, keys: list[str]) -> str:
    """Return the sentence for JSON without events. ``keys``: the keys of the top level."""
    if found := producer(keys):
        return of_another(source, found)
    has = filled(" (it has {})", ", ".join(keys[:5]))
    return f"{source.path} is JSON, but no trace: it has no traceEvents{has}. Give {_EXPORTED}."


def no_phases(source: TextChunks) -> str:
    """Return the sentence for a list whose values are not events."""
    return f"{source.path} is JSON, but no trace: its entries have no phase (ph). Give {_EXPORTED}."


def no_end(source: TextChunks) -> str:
    """Return the sentence for a file that ends before its first event."""
    where = source.problem or f"it ends at byte {source.bytes_read:,}"
    return f"{source.path} is not valid JSON, or cut short before its first event: {where}. Export it again."


def cut_short(source: TextChunks, events: int) -> str:
    """Return the sentence for a file that ends before its events do. ``events``: the number of events read."""
    where = source.problem or f"it ends at byte {source.bytes_read:,}, within the JSON"
    return (
        f"The file is cut short or damaged: {where}. The {events:,} events before that were read; the rest is "
        "missing (the program was killed while it wrote, the disk was full, or a copy or download was broken off)."
    )


def damaged_at_the_end(source: TextChunks) -> str:
    """Return the sentence for damaged gzip data around complete JSON, for example a wrong checksum."""
    return f"The file is damaged: {source.problem}. Its JSON is complete and was read, but some of it may be wrong."


_NOT_THAT_FAR = (
    "What could be read has no GPU kernels: the profiler writes most of them after the operators, so they are lost."
)


def notes(
    stream: EventStream, recording: Recording, launches: Launches, devices: tuple[Device, ...], wrong_ids: bool
) -> tuple[str, ...]:
    """Return sentences on missing parts of a trace and the consequences, the most important first."""
    return (*_of_the_file(stream, recording), *_of_kernels(stream, recording, launches, devices, wrong_ids))


def _of_the_file(stream: EventStream, recording: Recording) -> Iterator[str]:
    if stream.problem:
        yield stream.problem
    if stream.header_problem:
        yield stream.header_problem
    if left_out := stream.damaged + recording.unreadable:
        yield f"{left_out:,} events are left out because they are no valid JSON or no events of a trace."
    if recording.pairs:
        yield (
            f"{recording.pairs:,} events are halves of begin and end pairs (phases B and E), which torch.profiler does not "
            "write: they are left out, so that kernels may lack their operators."
        )
    if recording.without_duration:
        yield f"{recording.without_duration:,} events have no duration or a negative one: it is taken as 0."


def _of_kernels(
    stream: EventStream, recording: Recording, launches: Launches, devices: tuple[Device, ...], wrong_ids: bool
) -> Iterator[str]:
    if not len(recording.kernels):
        if recording.producer() is not None:
            return
        yield _no_kernels(recording, stream)
        return
    if not len(recording.operators):
        yield (
            "The trace has no operators, only the GPU's side: profile with ProfilerActivity.CPU too, so that kernels can be "
            "attributed."
        )
    elif not recording.has_shapes:
        yield "The operators have no shapes: profile with record_shapes=True to learn why a kernel is slow."
    if wrong_ids:
        yield (
            "The kernels' External id equals their correlation, as some versions of torch write it, and is no operator's: it is "
            "not used."
        )
    if launches.ambiguous:
        yield (
            f"{launches.ambiguous:,} kernels can't be matched with a launch: several processes share this file, and their "
            "launches have the same correlation. Read each rank's own trace."
        )
    if launches.shared:
        yield (
            f"{launches.shared:,} kernels have a correlation that others have too, though one launch starts one kernel (the "
            "trace was edited, or merged of several): which of them it started is unknown, and so are their operators."
        )
    if any(not device.vendor and not device.name for device in devices):
        yield "The trace does not describe its GPU (no deviceProperties): name the GPU to get verdicts that depend on it."
    if any(device.vendor == "AMD" for device in devices):
        yield "The GPU is AMD's: it has matrix cores, not Tensor Cores, and kernel names of their own."


def _no_kernels(recording: Recording, stream: EventStream) -> str:
    if stream.is_cut:
        return _NOT_THAT_FAR
    if any(len(columns) for columns in (recording.copies, recording.launches)):
        return (
            "The trace has no GPU kernels, though it has launches: the profiler's window ended before they ran (end it after "
            "torch.cuda.synchronize()), or GPU activity could not be collected (another profiler at work, or no permission)."
        )
    if len(recording.operators):
        return "The trace has no GPU activity at all: the run was on a CPU, or it was profiled without ProfilerActivity.CUDA."
    return "The trace has neither operators nor GPU activity: nothing ran while the profiler recorded, or another tool wrote it."
