"""How records lie in a session file: a header, then length, checksum, type and payload of each."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

FILE_NAME = "session.mpinspect"

#: As in PNG: a byte beyond ASCII and both line ends, so that a file mangled as text is told from ours at once.
MAGIC = b"\x89MPI\r\n\x1a\n"
#: Raised when an old reader would misread a new file; fields and record types can be added without.
SCHEMA_VERSION = 1
HEADER = MAGIC + struct.pack("<I", SCHEMA_VERSION)

INFO, WATCHED, KEYS, WINDOW = b"INFO", b"WTCH", b"KEYS", b"WIND"
EVENT, NOTE, PROGRESS, DROPPED = b"EVNT", b"NOTE", b"PROG", b"DROP"

#: Length of the payload, CRC-32 of type and payload, type.
_FRAME = struct.Struct("<II4s")
_CHECKED_FROM = 8


class SessionError(ValueError):
    """A session can't be read or written: says what happened, the likely cause and what to do."""


def frame(kind: bytes, payload: bytes) -> bytes:
    """One record as it stands in the file."""
    return _FRAME.pack(len(payload), zlib.crc32(kind + payload), kind) + payload


def frames(data: bytes, notes: list[str]) -> Iterator[tuple[int, bytes, bytes]]:
    """Offset, type and payload of each intact record after the header; why it ended early goes to ``notes``."""
    view = memoryview(data)
    start = len(HEADER)
    while start < len(data):
        body = start + _FRAME.size
        length, checksum, kind = _FRAME.unpack_from(data, start) if body <= len(data) else (0, 0, b"")
        if body + length > len(data):
            notes.append(
                "The session file ends within a record: the run is just writing it, or was killed while it did. "
                + left_out(data, start)
            )
            return
        # Type and payload lie side by side, so the checksum needs no copy.
        if zlib.crc32(view[start + _CHECKED_FROM : body + length]) != checksum:
            notes.append(f"The session file is damaged at byte {start}. {left_out(data, start)}")
            return
        yield start, kind, data[body : body + length]
        start = body + length


def payload_of(framed: bytes) -> bytes:
    """The payload of one record that was framed here."""
    return framed[_FRAME.size :]


def left_out(data: bytes, start: int) -> str:
    """A sentence on what a reader that stops at ``start`` does not see."""
    return (
        f"The last {len(data) - start:,} of its {len(data):,} bytes were left out; what stands before them is complete."
    )


def session_path(path: str | PathLike[str]) -> Path:
    """The session file that ``path``, a run directory or the file itself, means."""
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def reason(error: OSError) -> str:
    """What the operating system said, in words."""
    return os.strerror(error.errno).lower() if error.errno else str(error)
