"""Adds up the files of all ranks of a job during training: rank 0 writes one session and TensorBoard log a model.

Ranks write to files in one directory. Rank 0 reads these files at intervals, on a thread of its own. Ranks neither wait for
each other nor send messages, so a slow, stopped or failed rank costs rank 0 only a note in the report.

A collective, or a process group of our own, would need every rank. A late rank would delay the training of all others, and
a communicator with an abandoned collective can't be distinguished from a working one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mpinspect.ranges.capture.sinks import WINDOWS_A_WRITE
from mpinspect.ranges.report.tensorboard_curves import MOST_CURVES
from mpinspect.ranges.session import Event, Session
from mpinspect.ranges.store import FILE_NAME, session_bytes
from mpinspect.ranges.windows.window import coarsen
from mpinspect.run.directory import ALL_RANKS, ranks_of
from mpinspect.run.ranks import ModelsOfRanks
from mpinspect.runtime.appending import replace_whole
from mpinspect.runtime.background import Background, Seldom

#: Most seconds of processor time for adding up once during training; with its pauses it takes ten times as long. Beyond
#: this the user adds the ranks up with ``mpinspect report``.
MOST_S = 60.0
#: Most seconds that the end of the run waits for an addition that is under way.
_PATIENCE_S = 5.0


class AllRanks:
    """Keeps DIR/all-ranks/MODEL up to date while the ranks write to DIR/rank0, DIR/rank1, ... Never raises.

    Args:
        whole: the job's directory.
        clock: returns monotonic seconds.
        curves: number of tensors of each kind with scalars of their own in the TensorBoard log; None: all.
    """

    def __init__(
        self, whole: Path, clock: Callable[[], float] = time.monotonic, *, curves: int | None = MOST_CURVES
    ) -> None:
        self._whole = whole
        self._curves = curves
        self._seldom = Seldom(clock)
        self._background = Background()
        self._models: dict[str, _Model] = {}
        #: The files' sizes and times when they were last added up.
        self._seen: list[tuple[str, int, int]] = []
        self._given_up = False
        #: Sentences on what went wrong, each once.
        self.notes: list[str] = []

    def written(self) -> None:
        """Add up the ranks if it is time; called after each write of this rank, on the thread that writes."""
        if self._seldom.is_due and not self._given_up and not self._background.busy:
            self._seldom.begin()
            self._background.call(self._add_up)

    def finish(self, models: Iterable[tuple[str, Session]]) -> list[str]:
        """Write each model's final sum and close the logs, after the run has ended.

        Args:
            models: by name, the ranks' sums.

        Returns:
            Sentences on what went wrong.
        """
        self._given_up = True
        self._background.wait(_PATIENCE_S)
        if self._background.busy:
            self._note(f"the ranks were still being added up after {_PATIENCE_S:.0f} s: {self._elsewhere}")
            return self.notes
        self._attempt(lambda: self._write(models, is_last=True))
        for model in self._models.values():
            self._attempt(model.close)
        return self.notes

    def _add_up(self) -> None:
        with self._seldom.doing():
            self._attempt(self._read)

    def _read(self) -> None:
        places = ranks_of(self._whole)
        seen = [_state(file) for place in places for file in sorted(place.glob(f"*/{FILE_NAME}"))]
        if seen == self._seen:
            return
        found, began = ModelsOfRanks(), time.thread_time()
        for place in places:
            found.read(place)
            if time.thread_time() > began + MOST_S:
                self._given_up = True
                self._note(f"adding up {len(places):,} ranks takes more than {MOST_S:.0f} s: {self._elsewhere}")
            if self._given_up:
                return
        self._write(found.models())
        self._seen = seen

    def _write(self, models: Iterable[tuple[str, Session]], *, is_last: bool = False) -> None:
        for name, session in models:
            if len(session.ranks) > 1:
                if name not in self._models:
                    self._models[name] = _Model(self._whole / ALL_RANKS / name, self._curves)
                self._models[name].write(session, is_last=is_last)

    @property
    def _elsewhere(self) -> str:
        return f"mpinspect report {self._whole} adds them up"

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._note(f"the ranks' files could not be added up during training ({error!r}): {self._elsewhere}")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


class _Model:
    """The session file and TensorBoard log of a model of all ranks.

    Each write replaces the session, whose counts are the sums over the ranks' files, and appends to the log the windows
    that all ranks have completed.
    """

    def __init__(self, folder: Path, curves: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ranks = 0
        #: The last step whose window is in the log, and each rank's steps at the last check.
        self._last_step = -1
        self._steps: dict[int, int] = {}
        self._told: set[tuple[object, ...]] = set()
        self._log = None
        with suppress(ImportError):
            from mpinspect.ranges.report.tensorboard import TensorBoardSink

            self._log = TensorBoardSink(folder, curves=curves)

    def write(self, session: Session, *, is_last: bool = False) -> None:
        """Write the new windows. Does nothing if the session has fewer ranks than before, since some were unreadable."""
        if len(session.ranks) < self._ranks:
            return
        self._ranks = len(session.ranks)
        replace_whole(self._folder / FILE_NAME, session_bytes(session))
        if self._log is None:
            return
        until = session.progress.steps if is_last else self._complete_until(session)
        windows = [window for window in session.windows if self._last_step < window.last_step < until]
        self._log.watched(session.watched)
        self._log.precision(session.precision)
        for event in session.events:
            if (key := _identity(event)) not in self._told:
                self._told.add(key)
                self._log.event(event)
        for window in coarsen(windows, WINDOWS_A_WRITE):
            self._log.window(window)
            self._last_step = window.last_step
        self._log.progress(session.progress)
        self._log.conclude(session)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _complete_until(self, session: Session) -> int:
        """Return the number of steps whose counts all ranks have written.

        Ignores ranks that have ended, ranks that wrote nothing since the last call while others did, and ranks that
        have never written, once this set of ranks is the same in two calls.
        """
        steps = {rank.info.rank: rank.progress.steps for rank in session.ranks}
        before, self._steps = self._steps, steps
        if len(steps) < session.info.world_size and steps.keys() != before.keys():
            return 0
        going_on = [
            steps[rank.info.rank]
            for rank in session.ranks
            if not rank.progress.ended and steps[rank.info.rank] != before.get(rank.info.rank)
        ]
        return min(going_on, default=max(steps.values()))


def _state(file: Path) -> tuple[str, int, int]:
    """Return a file's name, size and time (ns), which change when it is written to."""
    try:
        status = file.stat()
    except OSError:
        return str(file), -1, -1
    return str(file), status.st_size, status.st_mtime_ns


def _identity(event: Event) -> tuple[object, ...]:
    return event.rank, event.step, event.micro_batch, event.phase, event.module
