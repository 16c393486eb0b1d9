"""What has been captured so far: bounded in memory, and passed on to whoever keeps it (the session file, TensorBoard)."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mpinspect.session import (
    Event,
    Progress,
    RunInfo,
    ScaleChange,
    Session,
    TensorInfo,
    Window,
    coarsen,
    merge_windows,
    window_limit,
)

#: Events held; what follows is the same trouble again.
EVENT_LIMIT = 1000
#: Changes of the loss scale held: a dynamic scaler makes two every couple of thousand steps.
SCALE_LIMIT = 1000
#: Least time between two writes, and how many times a write's own cost must pass between two (2% at most).
WRITE_INTERVAL_S = 1.0
WRITE_COST_FACTOR = 50


class MpinspectWarning(UserWarning):
    """Something that mpinspect can't do or no longer measures; the training goes on."""


def warn(sentence: str) -> None:
    """Say it as a MpinspectWarning. Where warnings are errors the training still goes on."""
    with contextlib.suppress(MpinspectWarning):
        warnings.warn(sentence, MpinspectWarning, stacklevel=2)


class Sink(Protocol):
    """Keeps what is captured. Raises OSError when it no longer can."""

    def watched(self, infos: Sequence[TensorInfo]) -> None: ...

    def window(self, window: Window) -> None: ...

    def event(self, event: Event) -> None: ...

    def note(self, note: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class Recording:
    """Windows, events and notes of one run.

    Args:
        info: what run it is.
        sinks: who else keeps it; one that fails is dropped with a warning.
        clock: seconds, monotonic.
        tell: says a note to the user, who may never come to read the report.
    """

    def __init__(
        self,
        info: RunInfo,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = warn,
    ) -> None:
        self.info = info
        self.progress = Progress()
        self.notes: list[str] = []
        self.events: list[Event] = []
        self._watched: list[TensorInfo] = []
        self._windows: list[Window] = []
        self._unwritten: list[Window] = []
        self._steps_per_window = 1
        self._sinks = list(sinks)
        self._clock = clock
        self._tell = tell
        self._write_after = 0.0

    def watch(self, infos: Sequence[TensorInfo]) -> None:
        """These tensors are watched."""
        self._watched = list(infos)
        self._each(lambda sink: sink.watched(infos))

    def note(self, sentence: str) -> None:
        """Something that could not be measured, and why. Told once, and kept for the report."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        self._each(lambda sink: sink.note(sentence))
        self._tell(sentence)

    def event(self, event: Event) -> None:
        """Something turned infinite or NaN. Passed on at once: the run may not live much longer."""
        if len(self.events) < EVENT_LIMIT:
            self.events.append(event)
            self._each(lambda sink: sink.event(event))
        elif len(self.events) == EVENT_LIMIT:
            self.note(f"more than {EVENT_LIMIT} steps were not finite: the later ones are not listed")

    def scale(self, step: int, scale: float | None) -> None:
        """The loss scale of a step; kept where it changes."""
        scales = self.progress.scales
        if not scales or scales[-1].scale != scale:
            if len(scales) >= SCALE_LIMIT:
                half = SCALE_LIMIT // 2
                scales = (*scales[:half], *scales[1 - half :])
                self.note(
                    f"the loss scale changed more than {SCALE_LIMIT} times: the first and the last {half} are kept"
                )
            self._progress(scales=(*scales, ScaleChange(step, scale)))

    def scale_unknown(self, reason: str) -> None:
        """A backward ran whose loss scale can't be known."""
        if self.progress.scale_known:
            self._progress(scale_known=False, scale_unknown_reason=reason)
            self.note(
                f"the loss scale is not known ({reason}): counts are of the gradients as they are, without advice"
            )

    def skips(self, skipped_steps: int) -> None:
        """So many steps were skipped, by what is known now."""
        self._progress(skipped_steps=skipped_steps)

    def wants_window(self, sampled_steps: int) -> bool:
        """Whether the open window is long enough to be closed."""
        return sampled_steps >= self._steps_per_window or self._write_due()

    def add_window(self, window: Window) -> None:
        """Take a closed window; the longer the run, the longer the windows."""
        self._windows.append(window)
        self._unwritten.append(window)
        if len(self._windows) >= 2 * window_limit(len(self._watched)):
            self._windows = list(coarsen(self._windows))
            self._steps_per_window = max(window.sampled_steps for window in self._windows)

    def step_done(self, steps: int, skipped_steps: int, backwards: int, sampled: bool) -> None:
        """A step ended."""
        self._progress(
            steps=steps,
            skipped_steps=skipped_steps,
            backwards=backwards,
            sampled_steps=self.progress.sampled_steps + sampled,
        )
        if self._unwritten and self._write_due():
            self.write()

    def write(self) -> None:
        """Pass on what the sinks have not had yet."""
        started = self._clock()
        if self._unwritten and self._sinks:
            window = merge_windows(*self._unwritten)
            self._each(lambda sink: sink.window(window))
        self._unwritten.clear()
        self._each(lambda sink: sink.progress(self.progress))
        ended = self._clock()
        self._write_after = ended + max(WRITE_INTERVAL_S, WRITE_COST_FACTOR * (ended - started))

    def close(self) -> None:
        """Write the rest and let the sinks go."""
        self._progress(ended=True)
        self.write()
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def abandon(self) -> list[Sink]:
        """Pass nothing on any more; returns the sinks, neither written nor closed."""
        sinks, self._sinks = self._sinks, []
        return sinks

    def session(self) -> Session:
        """All of it so far, as an immutable record."""
        return Session(
            self.info, tuple(self._watched), tuple(self._windows), tuple(self.events), tuple(self.notes), self.progress
        )

    def _write_due(self) -> bool:
        return bool(self._sinks) and self._clock() >= self._write_after

    def _progress(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    def _each(self, tell: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                tell(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self.note(
                    f"{type(sink).__name__} failed and is no longer written: {error}; the report is still complete"
                )
