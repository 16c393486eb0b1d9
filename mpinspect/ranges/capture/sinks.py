"""Forwards captured records to the sinks that store them (session file, TensorBoard), on a background thread."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpinspect.ranges.session import Event, Measurement, Precision, Progress
from mpinspect.ranges.windows.tensors import TensorInfo
from mpinspect.ranges.windows.window import Window, coarsen, merge_windows
from mpinspect.runtime.appending import may_pass
from mpinspect.runtime.background import Background

#: Maximum number of windows queued while the disk refuses them; beyond it, the oldest two are merged.
WAITING_LIMIT = 32
#: Maximum number of windows per write of a sink that yields: a curve needs no more, and TensorBoard takes 50 ms for one of 1,500
#: tensors.
WINDOWS_A_WRITE = 8
#: Maximum number of notes per sink on refused writes, so that a full disk does not flood the notes.
MOST_TOLD = 10


class Sink(Protocol):
    """Stores captured records; raises OSError when it can't. Called by different threads, but never concurrently.

    A sink with a true attribute ``yields`` pauses while an earlier sink's writes are refused, to leave the disk space to the
    earlier, more important records. Its windows are merged to WINDOWS_A_WRITE a write.
    """

    def watched(self, infos: Sequence[TensorInfo]) -> None: ...

    def window(self, window: Window) -> None: ...

    def event(self, event: Event) -> None: ...

    def note(self, note: str) -> None: ...

    def measurement(self, measurement: Measurement) -> None: ...

    def precision(self, precision: Precision) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class _Keeper:
    """A sink and its queued records; the queue is empty unless the sink's disk, or an earlier sink's, refuses writes."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.yields: bool = getattr(sink, "yields", False)
        #: The first step that the sink lacked when a write was refused; None while writes succeed.
        self.refused_since: int | None = None
        self.told = 0
        #: Number of steps that the sink has.
        self._steps = 0
        self._windows: list[Window] = []
        self._others: list[Callable[[Sink], None]] = []
        self._progress: Progress | None = None

    @property
    def lacks(self) -> bool:
        """Whether any records are queued."""
        return bool(self._windows or self._others or self._progress)

    @property
    def first_lost(self) -> int:
        """The first step whose records the sink lacks."""
        return self._windows[0].first_step if self._windows else self._steps

    def take(self, tell: Callable[[Sink], None]) -> None:
        self._others.append(tell)

    def take_windows(self, windows: Sequence[Window], progress: Progress) -> None:
        self._progress = progress
        self._windows += coarsen(windows, WINDOWS_A_WRITE) if self.yields else windows
        while len(self._windows) > WAITING_LIMIT:
            self._windows[:2] = [merge_windows(*self._windows[:2])]

    def join_windows(self) -> None:
        """Merge the queued windows into one, which takes the least disk space."""
        if len(self._windows) > 1:
            self._windows = [merge_windows(*self._windows)]

    def catch_up(self) -> None:
        """Pass all queued records to the sink, dequeuing each one it accepts; propagates the sink's exceptions."""
        while self._others:
            self._others[0](self.sink)
            del self._others[0]
        while self._windows:
            self.sink.window(self._windows[0])
            self._steps = max(self._steps, self._windows.pop(0).last_step + 1)
        if self._progress is not None:
            self.sink.progress(self._progress)
            self._steps = max(self._steps, self._progress.steps)
            self._progress = None

    def end_without(self, note: str) -> None:
        """Write the end of the run and a note on the lost records, as far as the disk accepts them."""
        others, self._others = self._others, [lambda sink: sink.note(note)]
        self._windows.clear()
        with contextlib.suppress(Exception):
            self.catch_up()
            self._others = others
            self.catch_up()


class Sinks:
    """Forwards captured records to the sinks, in order, without making the training wait.

    A sink whose disk refuses a write is retried with every new record, and its unsaved records are queued, with windows
    merged; a sink that fails otherwise is dropped. A forked child does not forward records, since the files belong to the
    parent.

    Args:
        sinks: the sinks that receive the records, the most important ones first.
        written: called each time that ``pass_on`` has forwarded its records, on the thread that forwards them.
    """

    def __init__(self, sinks: Sequence[Sink], written: Callable[[], None] | None = None) -> None:
        self._written = written
        self._keepers = [_Keeper(sink) for sink in sinks]
        self._background = Background()
        self._steps = 0
        self._failures: list[str] = []
        #: CPU seconds that the last ``pass_on`` took on the background thread.
        self.cost_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._keepers)

    @property
    def busy(self) -> bool:
        """Whether any forwarded records have not reached the sinks yet."""
        return self._background.busy

    def each(self, tell: Callable[[Sink], None], *, urgent: bool = False) -> None:
        """Call the function ``tell`` with each sink soon, on the background thread; ``urgent``: as soon as possible."""
        if self._keepers:
            self._background.call(lambda: self._tell(lambda keeper: keeper.take(tell)), urgent=urgent)

    def pass_on(self, windows: Sequence[Window], progress: Progress) -> None:
        """Forward the run's progress and some windows."""
        if self._keepers:
            self._background.call(lambda: self._pass_on(windows, progress))

    def close(self) -> None:
        """Forward everything, close the sinks, and return when that is done."""
        if self._keepers:
            self._background.call(self._close, urgent=True)
        self.wait()
        self._keepers.clear()

    def wait(self, most_s: float = math.inf) -> None:
        """Wait until everything has been forwarded, for at most ``most_s`` seconds."""
        self._background.wait(most_s)

    def failures(self) -> list[str]:
        """Return a sentence for each sink that failed since the last call."""
        found, self._failures = self._failures, []
        return found

    def abandon(self) -> list[Sink]:
        """Stop forwarding, and return the sinks without writing to them or closing them; does not wait."""
        keepers, self._keepers = self._keepers, []
        return [keeper.sink for keeper in keepers]

    def _pass_on(self, windows: Sequence[Window], progress: Progress) -> None:
        started = time.thread_time()
        self._steps = progress.steps
        self._tell(lambda keeper: keeper.take_windows(windows, progress))
        self.cost_s = time.thread_time() - started
        if self._written is not None:
            self._written()

    def _tell(self, take: Callable[[_Keeper], None]) -> None:
        is_refused = False
        for keeper in tuple(self._keepers):
            try:
                take(keeper)
                if not (keeper.yields and is_refused):
                    keeper.catch_up()
                    self._went_on(keeper)
            except Exception as error:
                # Without a keeper, another thread has closed or abandoned the sink.
                if keeper in self._keepers:
                    self._failed(keeper, error)
            is_refused |= keeper.refused_since is not None

    def _failed(self, keeper: _Keeper, error: Exception) -> None:
        name = type(keeper.sink).__name__
        if not may_pass(error):
            self._keepers.remove(keeper)
            sentence = f"{name} failed and is no longer written: {error}; the report is still complete"
            self._failures.append(sentence)
            with contextlib.suppress(Exception):
                keeper.sink.note(sentence)
        elif keeper.refused_since is None:
            keeper.refused_since = keeper.first_lost
            keeper.told += 1
            if keeper.told <= MOST_TOLD:
                self._failures.append(
                    f"{name} could not write the records since step {keeper.first_lost:,} ({error}): it tries again at each "
                    "write, and holds them in memory until then"
                )

    def _went_on(self, keeper: _Keeper) -> None:
        if keeper.refused_since is not None and keeper.told <= MOST_TOLD:
            self._failures.append(
                f"{type(keeper.sink).__name__} could write again at step {self._steps:,}: the records since step "
                f"{keeper.refused_since:,} have been written too, in longer windows"
            )
        keeper.refused_since = None

    def _close(self) -> None:
        self._tell(_Keeper.join_windows)
        for keeper in tuple(self._keepers):
            name = type(keeper.sink).__name__
            if keeper.lacks:
                sentence = (
                    f"{name} could not write until the end: the records since step {keeper.first_lost:,} are not in the "
                    "log_dir; the report is still complete"
                )
                self._failures.append(sentence)
                keeper.end_without(sentence)
            try:
                keeper.sink.close()
            except OSError as error:
                self._failures.append(f"{name} could not be closed: its last records may be missing ({error})")
            except Exception as error:
                self._failed(keeper, error)
