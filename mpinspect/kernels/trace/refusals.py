"""Sentences on files that are no trace, or not all of one."""

from __future__ import annotations

from mpinspect.kernels.trace.chunks import TextChunks

_EXPORTED = "the .json or .json.gz that torch.profiler's export_chrome_trace or tensorboard_trace_handler wrote"

#: What other files begin with.
_KINDS = {"PK\x03\x04": "a ZIP archive", "SQLite": "an SQLite database (Nsight's?)", "<": "HTML or XML"}


def no_json(source: TextChunks, beginning: str) -> str:
    """``beginning``: of the text, white space aside."""
    if not beginning:
        if source.problem:
            return f"{source.path} can't be read: {source.problem}. Copy or export it again."
        return (
            f"{source.path} is empty: the program was stopped before the profiler exported its trace. Export it again."
        )
    kind = next((f" but {kind}" for start, kind in _KINDS.items() if beginning.startswith(start)), "")
    return f"{source.path} is not JSON{kind}: it begins with {beginning!r}. Give {_EXPORTED}."


def no_trace(source: TextChunks, keys: list[str]) -> str:
    """``keys``: what the JSON object has."""
    has = f" (it has {', '.join(keys[:5])})" if keys else ""
    return f"{source.path} is JSON, but no trace: it has no traceEvents{has}. Give {_EXPORTED}."


def no_phases(source: TextChunks) -> str:
    return f"{source.path} is JSON, but no trace: what it lists has no phase (ph). Give {_EXPORTED}."


def no_end(source: TextChunks) -> str:
    where = source.problem or f"it ends at byte {source.bytes_read:,}"
    return f"{source.path} is not valid JSON, or cut short before its first event: {where}. Export it again."


def cut_short(source: TextChunks, events: int) -> str:
    """``events``: how many were read."""
    where = source.problem or f"it ends at byte {source.bytes_read:,}, within the JSON"
    return (
        f"The file is cut short or damaged: {where}. The {events:,} events before that were read; what came after them is "
        "missing (the program was killed while it wrote, the disk was full, or a copy or download was broken off)."
    )


def damaged_at_the_end(source: TextChunks) -> str:
    """The JSON is complete, but what it is packed in is not, as a checksum that does not fit."""
    return f"The file is damaged: {source.problem}. Its JSON is complete and was read, but some of it may be wrong."
