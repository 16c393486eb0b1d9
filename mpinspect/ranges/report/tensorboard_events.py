"""A TensorBoard events file that is written in the calling thread.

torch's SummaryWriter writes in a thread of its own: when the disk fails there, it prints a traceback, and later calls may
wait for it for ever. Here every call has written when it returns, or raises OSError and has written nothing. Nothing is
buffered, so a forked child has nothing to write a second time.
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
from mpinspect.runtime.appending import AppendedFile

#: Added to a checksum that itself stands in checksummed data, as TFRecord files have it.
_MASK_DELTA = 0xA282EAD8


class EventFile:
    """Appends summary values (protocol buffers, ``Summary.Value``) to a new file.

    Args:
        log_dir: where the file goes; made if need be.

    Raises:
        OSError: it can't be made or written, here and in every method.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._event: Any = Event
        self._file = AppendedFile(_new_file(directory))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add(self, values: Iterable[Any], step: int) -> None:
        """Append these values as one event of this step; nothing where there are none."""
        event = self._event(wall_time=time.time(), step=step)
        event.summary.value.extend(values)
        if event.summary.value:
            self._append(event.SerializeToString())

    def close(self) -> None:
        """Close the file; twice does nothing."""
        self._file.file.close()

    def _append(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.append(b"".join([length, _masked(length), data, _masked(data)]))


def _masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    rotated = checksum >> 15 | checksum << 17
    return struct.pack("<I", (rotated + _MASK_DELTA) & 0xFFFFFFFF)


def _new_file(directory: Path) -> FileIO:
    """Return a file whose name TensorBoard takes for its own and that no other writer has: time, host and process are in it."""
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while True:
        try:
            return (directory / f"{name}.{number}").open("xb", buffering=0)
        except FileExistsError:
            number += 1
