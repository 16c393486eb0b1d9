"""A TensorBoard events file that is written in the calling thread.

torch's SummaryWriter writes in its own thread: if the disk fails, that thread prints a traceback, and later calls may
wait for it forever. Here every call either writes its whole event before it returns, or raises OSError and writes
nothing. Nothing is buffered, so a forked child has no data to write a second time.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any

from mpinspect.ranges.report.crc32c import crc32c
from mpinspect.runtime.appending import AppendedFile, create_numbered

#: Added to the rotated checksum, as the TFRecord format specifies for checksums stored with their data.
_MASK_DELTA = 0xA282EAD8


class EventFile:
    """Appends summary values (protocol buffers, ``Summary.Value``) to a new file.

    Args:
        log_dir: the file's directory; created if missing.

    Raises:
        OSError: the file can't be created or written; every method may raise it.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._event: Any = Event
        self._file = AppendedFile(_new_file(directory))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add(self, values: Iterable[Any], step: int) -> None:
        """Append the values as one event of this step; do nothing if there are no values."""
        event = self._event(wall_time=time.time(), step=step)
        event.summary.value.extend(values)
        if event.summary.value:
            self._append(event.SerializeToString())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.file.close()

    def _append(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.append(b"".join([length, _masked(length), data, _masked(data)]))


def _masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    rotated = checksum >> 15 | checksum << 17
    return struct.pack("<I", (rotated + _MASK_DELTA) & 0xFFFFFFFF)


def _new_file(directory: Path) -> FileIO:
    """Create a file with a name that TensorBoard recognises, made unique by time, host, process and a number."""
    return create_numbered(
        directory, f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    )[1]
