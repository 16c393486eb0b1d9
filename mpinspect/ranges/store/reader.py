"""Reads a session file of a run that is finished, killed, damaged, or still being written."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mpinspect.ranges.session import Event, Measurement, Precision, Progress, RankRecord, RunInfo, Session
from mpinspect.ranges.store import frames, windows
from mpinspect.ranges.store.checks import MOST_TENSORS
from mpinspect.ranges.store.frames import FILE_NAME, HEADER, MAGIC, SCHEMA_VERSION, SessionError
from mpinspect.ranges.windows.tensors import Count, TensorInfo, TensorKey
from mpinspect.ranges.windows.window import Window
from mpinspect.runtime.decoding import DecodingError, bytes_of, parsed, typed

#: Largest file in bytes: twice the size of 65,536 tensors in 32 windows.
LARGEST_FILE = 512 << 20
#: On NFS, a compaction on another machine may replace the file while it is being read; a retry opens the new file.
_STALE_RETRIES = 5


def read_session(path: str | PathLike[str]) -> Session:
    """Read a run directory or a session file.

    Damaged or truncated data are left out, and a sentence in ``Session.notes`` gives their extent. Reads the whole file into
    memory.

    Raises:
        SessionError: the file does not exist, can't be opened, is no session file, or was written by a newer mpinspect.
    """
    file = frames.session_path(path)
    data = _read_bytes(file)
    _check_header(data, file)
    contents = _Contents()
    notes: list[str] = []
    for start, kind, payload in frames.frames(data, notes):
        try:
            contents.add(kind, payload)
        except ValueError as error:
            notes.append(
                f"The session file is damaged at byte {start}, or a newer mpinspect wrote it: the record there "
                f"can't be decoded ({kind.decode('ascii', 'backslashreplace')} {error}). {frames.left_out(data, start)}"
            )
            break
    return contents.session(notes)


class _Contents:
    """Collects the records read from a file and makes a Session of them."""

    def __init__(self) -> None:
        self.info = RunInfo()
        self.watched: dict[TensorKey, TensorInfo] = {}
        self.keys: list[TensorKey] = []
        self.windows: list[Window] = []
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.progress = Progress()
        self.precision = Precision()
        self.measurements: list[Measurement] = []
        self.ranks: list[RankRecord] = []
        self.dropped: Mapping[str, int] = {}
        self._decoder = windows.Decoder()
        self._take: dict[bytes, Callable[[Any], None]] = {
            frames.INFO: self._info,
            frames.WATCHED: self._watched,
            frames.KEYS: self._keys,
            frames.EVENT: lambda value: self.events.append(typed(Event, value)),
            frames.NOTE: lambda value: self.notes.append(typed(str, value)),
            frames.MEASUREMENT: lambda value: self.measurements.append(typed(Measurement, value)),
            frames.RANK: lambda value: self.ranks.append(typed(RankRecord, value)),
            frames.PRECISION: self._precision,
            frames.PROGRESS: self._progress,
            frames.DROPPED: self._dropped,
        }

    def add(self, kind: bytes, payload: bytes) -> None:
        """Add one record. Records of an unknown type (added by a later version) are skipped.

        Raises ValueError if the record is damaged.
        """
        if kind == frames.WINDOW:
            self.windows.append(self._decoder.decode(payload, self.keys))
        elif kind in self._take:
            self._take[kind](parsed(payload))

    def session(self, notes: list[str]) -> Session:
        """Return the session; the reader's own ``notes`` follow the run's."""
        dropped = [
            f"{count:,} further {what} are not in the session file, which holds only the first ones."
            for what, count in self.dropped.items()
        ]
        return Session(
            self.info,
            tuple(self.watched.values()),
            tuple(self.windows),
            tuple(self.events),
            (*self.notes, *dropped, *notes),
            self.progress,
            self.precision,
            tuple(self.measurements),
            tuple(self.ranks),
        )

    def _info(self, value: Any) -> None:
        self.info = typed(RunInfo, value)

    def _watched(self, value: Any) -> None:
        self.watched.update((info.key, info) for info in typed(tuple[TensorInfo, ...], value))
        _no_more(len(self.watched))

    def _keys(self, value: Any) -> None:
        self.keys.extend(typed(tuple[TensorKey, ...], value))
        _no_more(len(self.keys))

    def _precision(self, value: Any) -> None:
        self.precision = typed(Precision, value)

    def _progress(self, value: Any) -> None:
        self.progress = typed(Progress, value)

    def _dropped(self, value: Any) -> None:
        self.dropped = typed(Mapping[str, Count], value)  # type: ignore[type-abstract]


def _no_more(tensors: int) -> None:
    if tensors > MOST_TENSORS:
        raise DecodingError(f"are more than {MOST_TENSORS:,} tensors")


def _read_bytes(file: Path) -> bytes:
    for _ in range(_STALE_RETRIES):
        try:
            return bytes_of(file, LARGEST_FILE)
        except FileNotFoundError:
            raise SessionError(_nothing_there(file)) from None
        except DecodingError as error:
            raise SessionError(
                f"{file} {error}: a session file is never that large. Give the session file of a run."
            ) from None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise SessionError(f"{file} can't be read: {frames.reason(error)}.") from error
    raise SessionError(f"{file} can't be read: the network file system keeps reporting a stale handle. Try again.")


def _nothing_there(file: Path) -> str:
    folder = file.parent
    if file.name != FILE_NAME or not folder.is_dir():
        missing = folder if file.name == FILE_NAME else file
        return f"There is no {missing}: give a run directory (the log_dir of the inspector) or its {FILE_NAME}."
    with contextlib.suppress(OSError):
        if runs := sorted(str(found.parent) for found in folder.glob(f"*/{FILE_NAME}"))[:5]:
            return (
                f"{folder} itself holds no {FILE_NAME}, but directories in it do: {', '.join(runs)}. Give one of them."
            )
    return f"{folder} holds no {FILE_NAME}: no inspector had it as log_dir, or the inspector was not attached yet."


def _check_header(data: bytes, file: Path) -> None:
    if len(data) < len(HEADER) and MAGIC.startswith(data[: len(MAGIC)]):
        why = "it is no session file: give a run directory or a session file"
        if file.name == FILE_NAME:
            why = (
                "the run was killed before it wrote anything, the disk was full, or the file was cut off. Delete it and run "
                "again"
            )
        raise SessionError(f"{file} holds nothing ({len(data)} bytes): {why}.")
    if not data.startswith(MAGIC):
        raise SessionError(
            f"{file} is not an mpinspect session file (it begins with {data[: len(MAGIC)]!r}): give a run directory or a "
            "session file."
        )
    (version,) = struct.unpack_from("<I", data, len(MAGIC))
    if version > SCHEMA_VERSION:
        raise SessionError(
            f"{file} was written by a newer mpinspect (schema version {version}; this one reads up to {SCHEMA_VERSION}): "
            "upgrade mpinspect (pip install --upgrade mpinspect)."
        )
