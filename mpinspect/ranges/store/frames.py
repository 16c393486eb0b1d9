"""Layout of a session file: a header, then the length, checksum, type and payload of each record.

Small records (run, watched tensors, events, progress) are JSON, read by ``decoding.typed``: unknown fields are skipped
and missing fields take their defaults, so fields can be added without a new schema version. Non-finite floats, which
JSON can't hold, are written as "inf", "-inf" or "nan".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

FILE_NAME = "session.mpinspect"

#: As in PNG, a non-ASCII byte and both line endings, so that damage by a text-mode transfer is detected at once.
MAGIC = b"\x89MPI\r\n\x1a\n"
#: Incremented when an old reader would misread a new file; new fields and record types need no increment.
SCHEMA_VERSION = 1
HEADER = MAGIC + struct.pack("<I", SCHEMA_VERSION)

INFO, WATCHED, KEYS, WINDOW = b"INFO", b"WTCH", b"KEYS", b"WIND"
EVENT, NOTE, PROGRESS, DROPPED = b"EVNT", b"NOTE", b"PROG", b"DROP"
PRECISION, MEASUREMENT, RANK = b"PREC", b"MEAS", b"RANK"

#: Length of the payload, CRC-32 of type and payload, type.
_FRAME = struct.Struct("<II4s")
_CHECKED_FROM = 8


class SessionError(ValueError):
    """A session can't be read or written; the message contains the event, the likely cause and a remedy."""


def frame(kind: bytes, payload: bytes) -> bytes:
    """Return the bytes of one record in the file."""
    return _FRAME.pack(len(payload), zlib.crc32(kind + payload), kind) + payload


def frames(data: bytes, notes: list[str]) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the offset, type and payload of each record after the header; stop at the first that is cut off or damaged.

    The reason for an early stop is added to ``notes``.
    """
    view = memoryview(data)
    start = len(HEADER)
    while start < len(data):
        body = start + _FRAME.size
        length, checksum, kind = _FRAME.unpack_from(data, start) if body <= len(data) else (0, 0, b"")
        if body + length > len(data):
            notes.append(
                "The session file ends within a record: the run is still writing it, or was killed while writing it. "
                + left_out(data, start)
            )
            return
        # Type and payload are adjacent, so the checksum needs no copy.
        if zlib.crc32(view[start + _CHECKED_FROM : body + length]) != checksum:
            notes.append(f"The session file is damaged at byte {start}. {left_out(data, start)}")
            return
        yield start, kind, data[body : body + length]
        start = body + length


def payload_of(framed: bytes) -> bytes:
    """Return the payload of one record made by ``frame``."""
    return framed[_FRAME.size :]


def left_out(data: bytes, start: int) -> str:
    """Return a sentence on the part of the file that a reader skips if it stops at ``start``."""
    return (
        f"The last {len(data) - start:,} of its {len(data):,} bytes were left out; the bytes before them are complete."
    )


def session_path(path: str | PathLike[str]) -> Path:
    """Return the path of the session file, given that path or the run directory."""
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def reason(error: OSError) -> str:
    """Return the operating system's error message."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


# -- small records as JSON ----------------------------------------------------------------------------------------


def json_bytes(value: object) -> bytes:
    """Return a record, or a list of records, keys or sentences, as UTF-8 JSON."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        # A name can hold a lone surrogate (a path that is not UTF-8), which must be read back unchanged.
        "utf-8",
        "surrogatepass",
    )


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: dataclasses as dicts, tuples as lists, NumPy scalars as Python's, and
    non-finite floats as strings.
    """
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (dict, MappingProxyType)):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
