"""Who keeps what is captured (the session file, TensorBoard), told of it on a thread beside the training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpinspect.background import Background
from mpinspect.session import Event, Progress, TensorInfo, Window


class Sink(Protocol):
    """Keeps what is captured. Raises OSError when it no longer can. Its calls come one at a time, from changing threads."""

    def watched(self, infos: Sequence[TensorInfo]) -> None: ...

    def window(self, window: Window) -> None: ...

    def event(self, event: Event) -> None: ...

    def note(self, note: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Passes on what was captured, in order, and never keeps the training waiting.

    A sink that fails is told nothing more. In a forked child nothing is passed on: the files are the parent's.

    Args:
        sinks: who is told.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._background = Background()
        self._failures: list[str] = []
        #: Processor seconds that the last ``timed`` task took.
        self.cost_s = 0.0

    def __bool__(self) -> bool:
        """Whether anybody is told anything."""
        return bool(self._sinks)

    @property
    def busy(self) -> bool:
        """Whether they have not yet all that was passed on."""
        return self._background.busy

    def each(self, tell: Callable[[Sink], None], *, urgent: bool = False) -> None:
        """Call ``tell`` with each of them, soon; ``urgent``: as soon as can be."""
        if self._sinks:
            self._background.call(lambda: self._tell(tell), urgent=urgent)

    def pass_on(self, window: Callable[[], Window] | None, progress: Progress) -> None:
        """A window, which is made on the other thread, and how far the run has come."""
        if self._sinks:
            self._background.call(lambda: self._pass_on(window, progress))

    def close(self) -> None:
        """Returns when everything has been passed on and they are closed."""
        self.each(lambda sink: sink.close(), urgent=True)
        self.wait()
        self._sinks.clear()

    def wait(self, most_s: float = math.inf) -> None:
        """Returns when everything has been passed on, or time is up."""
        self._background.wait(most_s)

    def failures(self) -> list[str]:
        """A sentence for each that failed since this was last asked."""
        found, self._failures = self._failures, []
        return found

    def abandon(self) -> list[Sink]:
        """Pass nothing on any more; returns them, neither written nor closed. Waits for nothing."""
        sinks, self._sinks = self._sinks, []
        return sinks

    def _pass_on(self, window: Callable[[], Window] | None, progress: Progress) -> None:
        started = time.thread_time()
        if window is not None:
            try:
                made = window()
            except Exception as error:
                self._failures.append(
                    f"mpinspect failed to merge what was to be written ({error!r}): it is not in the log_dir"
                )
            else:
                self._tell(lambda sink: sink.window(made))
        self._tell(lambda sink: sink.progress(progress))
        self.cost_s = time.thread_time() - started

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                tell(sink)
            except Exception as error:
                if sink not in self._sinks:
                    # Closed or abandoned by another thread in the middle of this.
                    continue
                self._sinks.remove(sink)
                self._failures.append(
                    f"{type(sink).__name__} failed and is no longer written: {error}; the report is still complete"
                )
