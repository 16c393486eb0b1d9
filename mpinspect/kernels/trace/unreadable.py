"""Words the sentences on files that are not traces, or are truncated or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpinspect.kernels.trace.producers import producer
from mpinspect.reporting.words import filled

if TYPE_CHECKING:
    from mpinspect.kernels.trace.producers import Producer
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
