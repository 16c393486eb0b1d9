"""Forward captured records to the sinks that store them (session file, TensorBoard), on a background thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpinspect.ranges.session import Event, Measurement, Precision, Progress, TensorInfo, Window, merge_windows
from mpinspect.runtime.appending import no_room
from mpinspect.runtime.background import Background

#: Most windows queued while the disk is full; beyond, the oldest two are merged.
WAITING_LIMIT = 16
#: Most notes per sink on a full disk, so that a disk that keeps filling up does not flood the notes.
MOST_TOLD = 10


class Sink(Protocol):
    """Stores captured records; raises OSError when it can't. Called by different threads, but never concurrently."""

    def watched(self, infos: Sequence[TensorInfo]) -> None: ...

    def window(self, window: Window) -> None: ...

    def event(self, event: Event) -> None: ...

    def note(self, note: str) -> None: ...

    def measurement(self, measurement: Measurement) -> None: ...

    def precision(self, precision: Precision) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class _Keeper:
    """A sink and its queued records; the queue is empty unless the sink's disk is full."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        #: Number of steps done when the disk was found to be full; None if it is not full.
        self.full_since: int | None = None
        self.told = 0
        self._windows: list[Window] = []
        self._others: list[Callable[[Sink], None]] = []
        self._progress: Progress | None = None

    def take(self, tell: Callable[[Sink], None]) -> None:
        self._others.append(tell)

    def take_windows(self, windows: Sequence[Window], progress: Progress) -> None:
        self._progress = progress
        self._windows += windows
        while len(self._windows) > WAITING_LIMIT:
            self._windows[:2] = [merge_windows(*self._windows[:2])]

    def catch_up(self) -> None:
        """Pass all queued records to the sink, dequeuing each one it accepts; propagates the sink's exceptions."""
        while self._others:
            self._others[0](self.sink)
            del self._others[0]
        while self._windows:
            self.sink.window(self._windows[0])
            del self._windows[0]
        if self._progress is not None:
            self.sink.progress(self._progress)
            self._progress = None


class Sinks:
    """Forwards captured records to the sinks, in order, without making the training wait.

    A sink that fails is dropped, unless its disk is full: then it is retried with every new record, and its unsaved records
    are queued, with windows merged. In a forked child nothing is forwarded, since the files belong to the parent.

    Args:
        sinks: the sinks that receive the records.
        written: called each time that ``pass_on`` has forwarded what it was given, on the thread that forwards it.
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
        """Return whether there is any sink."""
        return bool(self._keepers)

    @property
    def busy(self) -> bool:
        """Whether any forwarded records have not reached the sinks yet."""
        return self._background.busy

    def each(self, tell: Callable[[Sink], None], *, urgent: bool = False) -> None:
        """Call ``tell`` with each sink soon, on the background thread; ``urgent`` means as soon as possible."""
        if self._keepers:
            self._background.call(lambda: self._tell(lambda keeper: keeper.take(tell)), urgent=urgent)

    def pass_on(self, windows: Callable[[], Sequence[Window]], progress: Progress) -> None:
        """Forward the run's progress and some windows, which ``windows`` creates on the background thread."""
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

    def _pass_on(self, windows: Callable[[], Sequence[Window]], progress: Progress) -> None:
        started = time.thread_time()
        self._steps = progress.steps
        made: Sequence[Window] = ()
        try:
            made = windows()
        except Exception as error:
            self._failures.append(
                f"mpinspect failed to merge the windows to be written ({error!r}): they are not in the log_dir"
            )
        self._tell(lambda keeper: keeper.take_windows(made, progress))
        self.cost_s = time.thread_time() - started
        if self._written is not None:
            self._written()

    def _tell(self, take: Callable[[_Keeper], None]) -> None:
        for keeper in tuple(self._keepers):
            try:
                take(keeper)
                keeper.catch_up()
            except Exception as error:
                # If the keeper is gone, another thread has closed or abandoned the sink meanwhile.
                if keeper in self._keepers:
                    self._failed(keeper, error)
            else:
                self._went_on(keeper)

    def _failed(self, keeper: _Keeper, error: Exception) -> None:
        name = type(keeper.sink).__name__
        if not no_room(error):
            self._keepers.remove(keeper)
            self._failures.append(f"{name} failed and is no longer written: {error}; the report is still complete")
        elif keeper.full_since is None:
            keeper.full_since = self._steps
            keeper.told += 1
            if keeper.told <= MOST_TOLD:
                self._failures.append(
                    f"{name} has had no room to write since step {self._steps:,} ({error}): it tries again at each write, "
                    "and until then keeps the counts in memory"
                )

    def _went_on(self, keeper: _Keeper) -> None:
        if keeper.full_since is not None and keeper.told <= MOST_TOLD:
            self._failures.append(
                f"{type(keeper.sink).__name__} has room again and goes on from step {self._steps:,}: the counts "
                f"since step {keeper.full_since:,} have been written too, in longer windows"
            )
        keeper.full_since = None

    def _close(self) -> None:
        self._tell(lambda keeper: None)
        for keeper in tuple(self._keepers):
            if keeper.full_since is not None:
                self._failures.append(
                    f"{type(keeper.sink).__name__} had no room until the end: the counts since step {keeper.full_since:,} "
                    "are not in the log_dir; the report is still complete"
                )
            try:
                keeper.sink.close()
            except Exception as error:
                self._failed(keeper, error)
