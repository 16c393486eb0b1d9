"""Writing a session file: appends while the run goes on, and rewrites the file shorter when it grows too long."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from types import TracebackType

from mpinspect.ranges.session import (
    Event,
    Measurement,
    Precision,
    Progress,
    RunInfo,
    TensorInfo,
    TensorKey,
    Window,
    coarsen_plan,
    merge_windows,
    window_limit,
)
from mpinspect.ranges.store import frames, windows
from mpinspect.ranges.store.frames import FILE_NAME, HEADER, frame
from mpinspect.ranges.store.save import cannot_write, claim
from mpinspect.runtime.appending import AppendedFile, write_all
from mpinspect.runtime.decoding import DecodingError

#: Events and notes kept, each: more than anyone reads, and 0.5 MB at most.
RECORD_LIMIT = 1000
#: Loss-scale changes kept: the first and the last half of them. A dynamic scaler at its defaults needs a million steps.
SCALE_LIMIT = 1000
#: Superseded progress records that the file may hold before it is rewritten.
STALE_BYTES = 1 << 20
#: Seconds between two flushes to disk (what a power failure may cost; a kill costs nothing) ...
SYNC_INTERVAL_S = 10.0
#: ... and the share of the run that they may take where the disk is slow.
SYNC_SHARE = 0.005


class SessionWriter:
    """Appends a run to ``log_dir``/session.mpinspect; every call is one write, complete when it returns. Written by the process
    that made it alone: ``close`` in a forked child lets go of the file and adds nothing.

    The file stays bounded however long the run: beyond twice ``limit`` windows (``session.window_limit`` unless given)
    neighbours are merged (counts add) and the file is rewritten and replaced in one go, readers seeing the old or the
    new one; of events and notes the first 1,000 are kept and the others counted. Not safe for calls from several
    threads at once.

    Every method but ``close`` raises OSError where the disk refuses; the record is then not in the file, what was
    there before still is, and later calls try again.

    Raises:
        SessionError: log_dir can't be made or written to, is a file, or holds a run already.
    """

    def __init__(self, log_dir: str | PathLike[str], info: RunInfo, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}: at least 1 window must stay")
        self.path = Path(log_dir) / FILE_NAME
        self._given_limit = limit
        #: More windows than this after a rewriting that failed, before the next try.
        self._patience = 0
        #: All that is in the file and stays as it is, framed, in order; windows and superseded records are not in it.
        self._fixed = [frame(frames.INFO, frames.json_bytes(info))]
        #: The latest of those that supersede one another.
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
        """Add to the tensors that the run watches; one with the key of an earlier one replaces it."""
        new = {info.key: info for info in infos if self._watched.get(info.key) != info}
        if new:
            self._append_fixed(frames.WATCHED, frames.json_bytes(tuple(new.values())))
            self._watched.update(new)

    def window(self, window: Window) -> None:
        """Add what was counted; its steps lie after those of the window before."""
        self._number_keys(window)
        self._append(frame(frames.WINDOW, windows.encode(window, self._keys)))
        self._windows.append(window.sampled_steps)
        if len(self._windows) > 2 * self._limit + self._patience:
            self._compact()

    def event(self, event: Event) -> None:
        """Add an event; beyond the first 1,000 they are only counted."""
        self._append_kept("events", frames.EVENT, frames.json_bytes(event))

    def note(self, sentence: str) -> None:
        """Add a sentence, once however often it comes."""
        if sentence not in self._notes:
            self._append_kept("notes", frames.NOTE, frames.json_bytes(sentence))
            self._notes.add(sentence)

    def measurement(self, measurement: Measurement) -> None:
        """Add a measurement; beyond the first 1,000 they are only counted."""
        self._append_kept("measurements", frames.MEASUREMENT, frames.json_bytes(measurement))

    def precision(self, precision: Precision) -> None:
        """Replace what was said before on the run's dtypes."""
        self._supersede(frames.PRECISION, frames.json_bytes(precision))

    def progress(self, progress: Progress) -> None:
        """Replace what was said before on how far the run has come. Writes about 150 bytes.

        Raises:
            FileNotFoundError: somebody has deleted the file: what is written to it from then on nobody could read.
        """
        if not self._closed and os.fstat(self._log.file.fileno()).st_nlink == 0 and not self.path.exists():
            raise FileNotFoundError(f"{self.path} was deleted while the run went on")
        if len(progress.scales) > SCALE_LIMIT:
            half = SCALE_LIMIT // 2
            self.note(f"Of the loss scale's changes the session file keeps the first and the last {half}.")
            progress = dataclasses.replace(progress, scales=progress.scales[:half] + progress.scales[-half:])
        if self._dropped:
            self._supersede(frames.DROPPED, frames.json_bytes(self._dropped))
        self._supersede(frames.PROGRESS, frames.json_bytes(progress))

    def close(self) -> None:
        """Flush to disk and let go of the file. Idempotent; raises nothing."""
        if self._closed:
            return
        # What could be written is written; the run must not end in an error for the rest. A forked child's is the parent's file.
        with contextlib.suppress(OSError):
            if self._process == os.getpid():
                if self._dropped:
                    self._supersede(frames.DROPPED, frames.json_bytes(self._dropped))
                os.fsync(self._log.file.fileno())
        with contextlib.suppress(OSError):
            self._log.file.close()
        self._closed = True

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Let go without close: an inspector that was never attached, say. Not made at all, it has no file.
        if hasattr(self, "_log"):
            self.close()

    # -- appending --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._append(HEADER + self._fixed[0])
        except OSError as error:
            self.close()
            self.path.unlink(missing_ok=True)
            raise cannot_write(self.path, error) from error

    def _append(self, data: bytes) -> None:
        """All of ``data`` or nothing of it: half a record would hide all that follows from readers."""
        if self._closed:
            raise ValueError(f"{self.path} is closed: nothing can be added to it")
        if self._log.file.closed:
            self._reopen()
        self._sync_when_due()
        self._log.append(data)

    def _reopen(self) -> None:
        """After a rewriting."""
        file = self.path.open("r+b", buffering=0)
        file.seek(self._log.size)
        self._log = AppendedFile(file, self._log.size)

    def _sync_when_due(self) -> None:
        """To disk at intervals only: the data survive the death of the process without, and fsync takes milliseconds."""
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
        """Write down which number stands for which tensor, before the first window that has it."""
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
        """Rewrite the file with fewer windows beside the old one, then replace it in one go: a reader has either.

        Should it fail (no room for both), the old file goes on growing and the next try waits.
        """
        rewritten = self.path.with_name(f"{FILE_NAME}.rewriting")
        try:
            framed = self._coarsened()
            data = b"".join([HEADER, *self._fixed, *(record for record, _ in framed), *self._latest.values()])
            with rewritten.open("wb", buffering=0) as out:
                write_all(out, data)
                os.fsync(out.fileno())
            # Windows replaces no file that is open; if opening it again fails, the next append tries once more.
            self._log.file.close()
            rewritten.replace(self.path)
        except (OSError, DecodingError):
            with contextlib.suppress(OSError):
                rewritten.unlink(missing_ok=True)
            self._patience = len(self._windows)
            self._stale_bytes = 0
            return
        self._log.size = len(data)
        self._windows = [sampled for _, sampled in framed]
        self._patience = 0
        self._stale_bytes = 0
        with contextlib.suppress(OSError):
            self._reopen()

    def _coarsened(self) -> list[tuple[bytes, int]]:
        """Return the windows' records and sampled steps after merging; those that stay alone are copied as they are."""
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
        """Return the windows' records as they stand in the file."""
        data = self.path.read_bytes()
        notes: list[str] = []
        found = [frame(kind, payload) for _, kind, payload in frames.frames(data, notes) if kind == frames.WINDOW]
        if notes or len(found) != len(self._windows):
            raise OSError(f"{self.path} does not hold what was written to it")
        return found
