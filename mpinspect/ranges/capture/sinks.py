"""The sinks that keep what is captured (the session file, TensorBoard), called on a thread beside the training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpinspect.ranges.session import Event, Measurement, Precision, Progress, TensorInfo, Window, merge_windows
from mpinspect.runtime.appending import no_room
from mpinspect.runtime.background import Background

#: Windows that wait for room on a full disk; beyond, neighbours are merged.
WAITING_LIMIT = 16
#: How often a full disk is told of: one that is full and has room again every second would fill the notes.
MOST_TOLD = 10


class Sink(Protocol):
    """Keeps what is captured. Raises OSError when it no longer can. Its calls come one at a time, from changing threads."""

    def watched(self, infos: Sequence[TensorInfo]) -> None: ...

    def window(self, window: Window) -> None: ...

    def event(self, event: Event) -> None: ...

    def note(self, note: str) -> None: ...

    def measurement(self, measurement: Measurement) -> None: ...

    def precision(self, precision: Precision) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class _Keeper:
    """A sink, and what waits for it: nothing, unless its disk is full."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        #: Steps done when the disk turned out to be full; None while it is not.
        self.full_since: int | None = None
        self.told = 0
        self._windows: list[Window] = []
        self._others: list[Callable[[Sink], None]] = []
        self._progress: Progress | None = None

    def take(self, tell: Callable[[Sink], None]) -> None:
        self._others.append(tell)

    def take_window(self, window: Window | None, progress: Progress) -> None:
        self._progress = progress
        if window is not None:
            self._windows.append(window)
        if len(self._windows) > WAITING_LIMIT:
            self._windows[:2] = [merge_windows(*self._windows[:2])]

    def catch_up(self) -> None:
        """Pass on all that waits; raises what the sink raises, and what it has got waits no more."""
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
    """Passes on what was captured, in order, without ever making the training wait.

    A sink that fails is told nothing more, but for want of room on its disk: then it is tried again each time that there is
    something to tell, and what it has not kept waits, its windows merged. In a forked child nothing is passed on: the files
    are the parent's.

    Args:
        sinks: who is told.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._keepers = [_Keeper(sink) for sink in sinks]
        self._background = Background()
        self._steps = 0
        self._failures: list[str] = []
        #: Processor seconds that the last ``timed`` task took.
        self.cost_s = 0.0

    def __bool__(self) -> bool:
        """Return whether there is any sink."""
        return bool(self._keepers)

    @property
    def busy(self) -> bool:
        """Whether something that was passed on is still on its way."""
        return self._background.busy

    def each(self, tell: Callable[[Sink], None], *, urgent: bool = False) -> None:
        """Call ``tell`` with each of them, soon; ``urgent``: as soon as can be."""
        if self._keepers:
            self._background.call(lambda: self._tell(lambda keeper: keeper.take(tell)), urgent=urgent)

    def pass_on(self, window: Callable[[], Window] | None, progress: Progress) -> None:
        """Pass on a window, which is made on the other thread, and how far the run has come."""
        if self._keepers:
            self._background.call(lambda: self._pass_on(window, progress))

    def close(self) -> None:
        """Returns when everything has been passed on and they are closed."""
        if self._keepers:
            self._background.call(self._close, urgent=True)
        self.wait()
        self._keepers.clear()

    def wait(self, most_s: float = math.inf) -> None:
        """Returns when everything has been passed on, or time is up."""
        self._background.wait(most_s)

    def failures(self) -> list[str]:
        """Return a sentence for each sink that failed since the last call."""
        found, self._failures = self._failures, []
        return found

    def abandon(self) -> list[Sink]:
        """Pass nothing on any more; returns them, neither written nor closed. Waits for nothing."""
        keepers, self._keepers = self._keepers, []
        return [keeper.sink for keeper in keepers]

    def _pass_on(self, window: Callable[[], Window] | None, progress: Progress) -> None:
        started = time.thread_time()
        self._steps = progress.steps
        made = None
        if window is not None:
            try:
                made = window()
            except Exception as error:
                self._failures.append(
                    f"mpinspect failed to merge what was to be written ({error!r}): it is not in the log_dir"
                )
        self._tell(lambda keeper: keeper.take_window(made, progress))
        self.cost_s = time.thread_time() - started

    def _tell(self, take: Callable[[_Keeper], None]) -> None:
        for keeper in tuple(self._keepers):
            try:
                take(keeper)
                keeper.catch_up()
            except Exception as error:
                # Else it was closed or abandoned by another thread in the middle of this.
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
                    "and what is counted meanwhile waits in memory"
                )

    def _went_on(self, keeper: _Keeper) -> None:
        if keeper.full_since is not None and keeper.told <= MOST_TOLD:
            self._failures.append(
                f"{type(keeper.sink).__name__} has room again and goes on from step {self._steps:,}: what was counted "
                f"since step {keeper.full_since:,} has been written too, in longer windows"
            )
        keeper.full_since = None

    def _close(self) -> None:
        self._tell(lambda keeper: None)
        for keeper in tuple(self._keepers):
            if keeper.full_since is not None:
                self._failures.append(
                    f"{type(keeper.sink).__name__} had no room to the end: what was counted since step {keeper.full_since:,} "
                    "is not in the log_dir; the report is still complete"
                )
            try:
                keeper.sink.close()
            except Exception as error:
                self._failed(keeper, error)
