"""Writes a session file: appends records during the run, and rewrites the file shorter when it grows too long."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Iterable
from io import FileIO
from os import PathLike
from pathlib import Path
from types import TracebackType

from mpinspect.ranges.session import Event, Measurement, Precision, Progress, RunInfo
from mpinspect.ranges.store import frames, windows
from mpinspect.ranges.store.frames import FILE_NAME, HEADER, frame
from mpinspect.ranges.store.save import cannot_write, claim
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.ranges.windows.window import Window, coarsen_plan, merge_windows, window_limit
from mpinspect.runtime.appending import AppendedFile, replace_whole
from mpinspect.runtime.decoding import DecodingError
from mpinspect.runtime.finalizing import until_finalized

#: Maximum number of records of each kind (events, notes, measurements): more than anyone reads, and at most 0.5 MB each.
RECORD_LIMIT = 1000
#: Maximum number of stored loss-scale changes, half of them the first and half the last ones. A dynamic scaler at its defaults
#: needs a million steps to exceed it.
SCALE_LIMIT = 1000
#: Bytes of superseded records that the file may hold before it is rewritten.
STALE_BYTES = 1 << 20
#: Seconds between two flushes to disk: a power failure loses at most the records of these seconds; a kill loses no records.
SYNC_INTERVAL_S = 10.0
#: Largest share of the run's time spent in flushes; on a slow disk they are less frequent.
SYNC_SHARE = 0.005


class SessionWriter:
    """Appends a run to ``log_dir``/session.mpinspect; every record is written completely before its call returns.

    Only the process that created the writer may write: in a forked child, ``close`` closes the file without writing.

    The file stays bounded however long the run: beyond twice ``limit`` windows (``session.window_limit`` by default),
    neighbouring windows are merged (counts add), and a shorter file replaces the old one atomically for readers. The first
    1,000 events, notes and measurements each are stored, and the others only counted. Not thread-safe.

    Every method raises OSError if the disk refuses a write; the record is then not in the file, the earlier records still
    are, and later calls try again.

    Args:
        log_dir: the directory; resolved once, so that a later ``os.chdir`` or changed link does not redirect it.
        info: facts about the run.
        limit: half of the maximum number of windows in the file; None: by the number of tensors.

    Raises:
        TakenError: log_dir already holds a run.
        SessionError: log_dir can't be made or written to, or is a file.
    """

    def __init__(self, log_dir: str | PathLike[str], info: RunInfo, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}: at least 1 window must stay")
        self.path = _resolved(log_dir) / FILE_NAME
        self._given_limit = limit
        #: Extra windows allowed after a failed rewrite before the next attempt.
        self._patience = 0
        #: The framed records that a rewrite copies unchanged, in order: all but windows and the kinds in ``_latest``.
        self._fixed = [frame(frames.INFO, frames.json_bytes(info))]
        #: The latest record of each kind whose new records supersede the old ones.
        self._latest: dict[bytes, bytes] = {}
        self._stale_bytes = 0
        self._watched: dict[TensorKey, TensorInfo] = {}
        self._keys: dict[TensorKey, int] = {}
        #: Sampled steps of each window in the file.
        self._windows: list[int] = []
        self._kept: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._notes: set[str] = set()
        self._synced_at = time.monotonic()
        self._sync_every = SYNC_INTERVAL_S
        self._closed = False
        self._process = os.getpid()
        self._log = AppendedFile(claim(self.path))
        self._begin()

    def watched(self, infos: Iterable[TensorInfo]) -> None:
        """Add watched tensors; a tensor with an earlier one's key replaces it."""
        new = {info.key: info for info in infos if self._watched.get(info.key) != info}
        if new:
            self._append_fixed(frames.WATCHED, frames.json_bytes(tuple(new.values())))
            self._watched.update(new)

    def window(self, window: Window) -> None:
        """Add a window of counts; its steps must follow the previous window's."""
        self._number_keys(window)
        self._append(frame(frames.WINDOW, windows.encode(window, self._keys)))
        self._windows.append(window.sampled_steps)
        if len(self._windows) > 2 * self._limit + self._patience:
            self._compact()

    def event(self, event: Event) -> None:
        """Add an event; events after the first 1,000 are only counted."""
        self._append_kept("events", frames.EVENT, frames.json_bytes(event))

    def note(self, sentence: str) -> None:
        """Add a sentence; repeated sentences are written only once."""
        if sentence not in self._notes:
            self._append_kept("notes", frames.NOTE, frames.json_bytes(sentence))
            self._notes.add(sentence)

    def measurement(self, measurement: Measurement) -> None:
        """Add a measurement; measurements after the first 1,000 are only counted."""
        self._append_kept("measurements", frames.MEASUREMENT, frames.json_bytes(measurement))

    def precision(self, precision: Precision) -> None:
        """Replace the record of the run's dtypes."""
        self._supersede(frames.PRECISION, frames.json_bytes(precision))

    def progress(self, progress: Progress) -> None:
        """Replace the record of the run's progress. Writes about 150 bytes.

        Raises:
            FileNotFoundError: the file was deleted during the run, so that further records would be lost.
        """
        if not self._closed and os.fstat(self._open_file().fileno()).st_nlink == 0 and not self.path.exists():
            raise FileNotFoundError(f"{self.path} was deleted during the run")
        if len(progress.scales) > SCALE_LIMIT:
            half = SCALE_LIMIT // 2
            self.note(f"The session file holds only the first and the last {half} changes of the loss scale.")
            progress = dataclasses.replace(progress, scales=progress.scales[:half] + progress.scales[-half:])
        if self._dropped:
            self._supersede(frames.DROPPED, frames.json_bytes(self._dropped))
        self._supersede(frames.PROGRESS, frames.json_bytes(progress))

    @until_finalized
    def close(self) -> None:
        """Flush to disk and close the file. Idempotent.

        Raises:
            OSError: the last records may not be on the disk. The file is closed in any case.
        """
        if self._closed:
            return
        try:
            # In a forked child the file belongs to the parent.
            if self._process == os.getpid():
                if self._dropped:
                    self._supersede(frames.DROPPED, frames.json_bytes(self._dropped))
                if not self._log.file.closed:
                    os.fsync(self._log.file.fileno())
        finally:
            self._closed = True
            self._log.file.close()

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Close a writer that was dropped without ``close``. If the constructor failed, there is no ``_log``.
        if hasattr(self, "_log"):
            with contextlib.suppress(OSError):
                self.close()

    # -- appending --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._append(HEADER + self._fixed[0])
        except OSError as error:
            self._closed = True
            self._log.file.close()
            self.path.unlink(missing_ok=True)
            raise cannot_write(self.path, error) from error

    def _append(self, data: bytes) -> None:
        """Append all of ``data``, or leave the file unchanged: a partial record would hide all later records from readers."""
        if self._closed:
            raise ValueError(f"{self.path} is closed: no record can be added to it")
        self._open_file()
        self._sync_when_due()
        self._log.append(data)

    def _open_file(self) -> FileIO:
        """Return the open file, reopened if a rewrite has closed it. Raises OSError, also if the file was changed since."""
        if not self._log.file.closed:
            return self._log.file
        file = self.path.open("r+b", buffering=0)
        if file.seek(0, os.SEEK_END) != self._log.size:
            file.close()
            raise OSError(errno.EIO, f"{self.path} was changed by another program")
        self._log = AppendedFile(file, self._log.size)
        return file

    def _sync_when_due(self) -> None:
        """Flush to disk if the interval is over. Only a power failure needs fsync, which takes milliseconds."""
        began = time.monotonic()
        if began - self._synced_at < self._sync_every:
            return
        self._synced_at = began
        os.fsync(self._log.file.fileno())
        self._sync_every = max(SYNC_INTERVAL_S, (time.monotonic() - began) / SYNC_SHARE)

    def _append_fixed(self, kind: bytes, payload: bytes) -> None:
        framed = frame(kind, payload)
        self._append(framed)
        self._fixed.append(framed)

    def _supersede(self, kind: bytes, payload: bytes) -> None:
        framed = frame(kind, payload)
        if self._latest.get(kind) == framed:
            return
        self._append(framed)
        self._stale_bytes += len(self._latest.get(kind, b""))
        self._latest[kind] = framed
        if self._stale_bytes > max(STALE_BYTES, self._log.size // 2):
            self._compact()

    def _number_keys(self, window: Window) -> None:
        """Number the window's new tensors and write their keys to the file, before the window that refers to them."""
        new = [key for key in window.tensors if key not in self._keys]
        if new:
            self._append_fixed(frames.KEYS, frames.json_bytes(new))
            self._keys.update(zip(new, range(len(self._keys), len(self._keys) + len(new)), strict=True))

    def _append_kept(self, what: str, kind: bytes, payload: bytes) -> None:
        kept = self._kept.get(what, 0) + 1
        if kept > RECORD_LIMIT:
            self._dropped[what] = kept - RECORD_LIMIT
        else:
            self._append_fixed(kind, payload)
        self._kept[what] = kept

    @property
    def _limit(self) -> int:
        return self._given_limit or window_limit(len(self._keys))

    # -- keeping it short ---------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Write a new file with fewer windows in the same directory, then replace the old one atomically for readers.

        If that fails (no space for both files, or the file was moved), the old file grows further, and the next attempt waits
        for more windows.
        """
        try:
            if not os.path.samestat(os.fstat(self._log.file.fileno()), self.path.stat()):
                raise FileNotFoundError(f"{self.path} was moved, and another file has its name")
            framed = self._coarsened()
            data = b"".join([HEADER, *self._fixed, *(record for record, _ in framed), *self._latest.values()])
            # Microsoft Windows can't replace an open file. If reopening fails, the next append tries again.
            replace_whole(self.path, data, before=self._log.file.close)
        except (OSError, DecodingError):
            self._patience = len(self._windows)
            self._stale_bytes = 0
            return
        self._log.size = len(data)
        self._windows = [sampled for _, sampled in framed]
        self._patience = 0
        self._stale_bytes = 0
        with contextlib.suppress(OSError):
            self._open_file()

    def _coarsened(self) -> list[tuple[bytes, int]]:
        """Return the windows' records and sampled steps after merging; unmerged windows are copied unchanged."""
        found = self._window_records()
        keys = list(self._keys)
        decoder = windows.Decoder()
        result = []
        for group in coarsen_plan(self._windows, self._limit):
            if len(group) == 1:
                result.append((found[group[0]], self._windows[group[0]]))
                continue
            merged = merge_windows(*(decoder.decode(frames.payload_of(found[index]), keys) for index in group))
            result.append((frame(frames.WINDOW, windows.encode(merged, self._keys)), merged.sampled_steps))
        return result

    def _window_records(self) -> list[bytes]:
        """Return the windows' records as read back from the file.

        Raises OSError if the file does not hold all the windows written to it.
        """
        data = self.path.read_bytes()
        notes: list[str] = []
        found = [frame(kind, payload) for _, kind, payload in frames.frames(data, notes) if kind == frames.WINDOW]
        if notes or len(found) != len(self._windows):
            raise OSError(f"{self.path} lacks records that were written to it")
        return found


def _resolved(path: str | PathLike[str]) -> Path:
    # Unlike Path.resolve, realpath does not raise on a loop of links: creating the file then raises OSError.
    return Path(os.path.realpath(path))
