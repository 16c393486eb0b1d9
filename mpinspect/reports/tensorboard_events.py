"""A TensorBoard events file that is written in the calling thread.

torch's SummaryWriter writes in a thread of its own: when the disk fails there, it prints a traceback, and later calls may
wait for it for ever. Here every call has written when it returns, or raises OSError.
"""

from __future__ import annotations

import os
import socket
import time
from os import PathLike
from pathlib import Path
from typing import Any


class EventFile:
    """Appends summaries (protocol buffers, as ``torch.utils.tensorboard.summary`` makes them) to a new file.

    Args:
        log_dir: where the file goes; made if need be.

    Raises:
        OSError: it can't be made or written, here and in every method.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._event = Event
        self._file = _new_file(directory)
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._file.flush()

    def add(self, summaries: list[Any], step: int) -> None:
        """Append the values of these summaries as one event of this step, and flush."""
        if not summaries:
            return
        event = self._event(wall_time=time.time(), step=step)
        for summary in summaries:
            event.summary.value.extend(summary.value)
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file; twice does nothing."""
        self._file.close()


def _new_file(directory: Path) -> Any:
    """A file whose name TensorBoard takes for its own and that no other writer has: time, host and process are in it."""
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while True:
        try:
            return (directory / f"{name}.{number}").open("xb")
        except FileExistsError:
            number += 1
