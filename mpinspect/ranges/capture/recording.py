"""The record of a run so far: bounded in memory, and passed on to the sinks that keep it (session file, TensorBoard)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mpinspect.ranges.capture.sinks import Sink, Sinks
from mpinspect.ranges.session import (
    Event,
    Measurement,
    Precision,
    Progress,
    RunInfo,
    ScaleChange,
    Session,
    TensorInfo,
    TensorKey,
    Window,
    merge_windows,
    window_limit,
)
from mpinspect.ranges.store.columns import TensorColumns
from mpinspect.reporting.streams import printable
from mpinspect.runtime.user_line import warn_user


class WindowList:
    """Keeps fewer than twice ``limit`` windows of about one length, every total exactly.

    ``session.coarsen`` would merge all of them at a time, which takes a second where there are a thousand tensors. Here the
    wanted length doubles when there are too many windows, and from then on each that comes has one pair of neighbours merged.
    """

    def __init__(self) -> None:
        self._windows: list[Window] = []
        #: Sampled steps that a window should have.
        self.length = 1
        #: Windows before this one have been looked at since the length doubled; None: all have.
        self._looked_at: int | None = None

    def add(self, window: Window, limit: int) -> None:
        """Take a window that follows on the last; merges at most two pairs."""
        self.length = max(self.length, window.sampled_steps)
        if self._windows and self._fit(self._windows[-1], window):
            self._windows[-1] = merge_windows(self._windows[-1], window)
        else:
            self._windows.append(window)
        if self._looked_at is not None:
            self._merge_a_pair()
        while len(self._windows) >= 2 * limit:
            self.length *= 2
            self._looked_at = 0
            self._merge_a_pair()

    def __len__(self) -> int:
        return len(self._windows)

    def as_tuple(self) -> tuple[Window, ...]:
        """Return the windows in the order of their steps."""
        return tuple(self._windows)

    def _merge_a_pair(self) -> None:
        for index in range(self._looked_at or 0, len(self._windows) - 1):
            if self._fit(*self._windows[index : index + 2]):
                self._windows[index : index + 2] = [merge_windows(*self._windows[index : index + 2])]
                self._looked_at = index
                return
        self._looked_at = None

    def _fit(self, first: Window, second: Window) -> bool:
        # A window without a sample still counts as one, else any number of them would pass for few.
        return max(first.sampled_steps, 1) + max(second.sampled_steps, 1) <= self.length


#: Events held; what follows is the same trouble again.
EVENT_LIMIT = 1000
#: Measurements held: observers measure a few of their kind, and this bounds them all.
MEASUREMENT_LIMIT = 1000
#: Changes of the loss scale held: a dynamic scaler makes two every couple of thousand steps.
SCALE_LIMIT = 1000
#: Tensors that one note names.
NAMED_LIMIT = 5
#: Least time between two writes, and how many times a write's own cost must pass between two (2% at most).
WRITE_INTERVAL_S = 1.0
WRITE_COST_FACTOR = 50
#: What the first event may have the training wait for.
FIRST_EVENT_WAIT_S = 0.1
#: Windows that wait for a slow disk.
UNWRITTEN_LIMIT = 16
#: From so many tensors on a window that comes as objects is kept as columns.
LEAST_COLUMNS = 32


class MpinspectWarning(UserWarning):
    """Something that mpinspect can't do or no longer measures; the training goes on."""


def warn(sentence: str) -> None:
    """Give a MpinspectWarning that names the user's line. Where warnings are errors the training still goes on."""
    with contextlib.suppress(MpinspectWarning):
        warn_user(printable(sentence), MpinspectWarning)


class Recording:
    """Keeps the windows, events and notes of one run.

    Args:
        info: what run it is.
        sinks: who else keeps it, told on a thread beside the training; one that fails is dropped with a warning.
        clock: seconds, monotonic.
        tell: says a note to the user, who may never come to read the report. Called on the thread that records.
        announce: is given each event as it comes, on the thread that noticed it.
    """

    def __init__(
        self,
        info: RunInfo,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = warn,
        announce: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.info = info
        self.progress = Progress()
        self.precision = Precision()
        self.measurements: list[Measurement] = []
        #: What the step that ends adds to the measured cost.
        self._cost: dict[str, float] = {}
        self.notes: list[str] = []
        self.events: list[Event] = []
        self._watched: list[TensorInfo] = []
        self._windows = WindowList()
        self._unwritten: list[Window] = []
        self._sinks = Sinks(sinks)
        self._clock = clock
        self._tell = tell
        self._announce = announce
        self._written_at = -math.inf

    def watch(self, infos: Sequence[TensorInfo]) -> None:
        """Take the tensors that are watched."""
        self._watched = list(infos)
        self._sinks.each(lambda sink: sink.watched(infos))

    def note(self, sentence: str) -> None:
        """Keep for the report what could not be measured, and why; warn of it once."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        self._sinks.each(lambda sink: sink.note(sentence))
        self._tell(sentence)

    def event(self, event: Event) -> None:
        """Keep an event and pass it on at once: the run may not live much longer."""
        if len(self.events) < EVENT_LIMIT:
            self.events.append(event)
            self._sinks.each(lambda sink: sink.event(event), urgent=True)
            if len(self.events) == 1:
                # The run may die in this very step: the first culprit is on disk before it goes on, unless the disk is slow.
                self._sinks.wait(FIRST_EVENT_WAIT_S)
            self._announce(event)
        elif len(self.events) == EVENT_LIMIT:
            self.note(f"more than {EVENT_LIMIT} steps were not finite: the later ones are not listed")

    def measured(self, measurement: Measurement) -> None:
        """Keep a measurement; of any number the first MEASUREMENT_LIMIT."""
        if len(self.measurements) < MEASUREMENT_LIMIT:
            self.measurements.append(measurement)
            self._sinks.each(lambda sink: sink.measurement(measurement))

    def dtypes(self, precision: Precision) -> None:
        """Take the run's dtypes as far as they are known now."""
        if precision != self.precision:
            self.precision = precision
            self._sinks.each(lambda sink: sink.precision(precision))

    def unread(self, done: str, tensors: Mapping[str, Sequence[TensorKey]]) -> None:
        """Name the tensors that could not be read, in a note and, should they never be counted, in the report's coverage.

        Args:
            done: what was to be done with them: "counted", "watched".
            tensors: by the error that was raised.
        """
        for reason, keys in tensors.items():
            names = [
                f"the {key.kind.replace('_', ' ')} of {key.name!r}" if key.name else f"the model's own {key.kind}"
                for key in keys
            ]
            more = f" and {len(names) - NAMED_LIMIT} more" if len(names) > NAMED_LIMIT else ""
            self.note(
                f"{', '.join(names[:NAMED_LIMIT])}{more} could not be {done} ({reason}); all else is, and the training is not "
                "affected"
            )
        notes = {key: f"could not be counted: {reason}" for reason, keys in tensors.items() for key in keys}
        if notes and done == "counted":
            self.watch([replace(info, note=info.note or notes.get(info.key, "")) for info in self._watched])

    def scale(self, step: int, scale: float | None) -> None:
        """Take the loss scale of a step; it is kept where it changes."""
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
        """Note once that a backward's loss scale can't be known."""
        if self.progress.scale_known:
            self._progress(scale_known=False, scale_unknown_reason=reason)
            self.note(
                f"the loss scale is not known ({reason}): counts are of the gradients as they are, without advice"
            )

    def weights_moved(self, moved: bool | None) -> None:
        """Take whether any update was applied in the run; None where that is not known."""
        self._progress(weights_moved=moved)

    def skips(self, skipped_steps: int) -> None:
        """Take the number of skipped steps, as far as it is known now."""
        self._progress(skipped_steps=skipped_steps)

    def spent(self, watched: bool, bare_s: float | None, own_s: float, earlier_s: float) -> None:
        """Take what a step cost, where that is measured; before its ``step_done``.

        Args:
            watched: whether the watch looked at it.
            bare_s: seconds of training that it counts for; None where its beginning was not seen, and nothing is measured.
            own_s: seconds that the inspector took meanwhile.
            earlier_s: seconds of steps before that a device told of now.
        """
        now = self.progress
        self._cost = {"watched_steps": (now.watched_steps or 0) + watched}
        if bare_s is not None:
            self._cost |= {
                "measured_steps": now.measured_steps + 1,
                "bare_s": now.bare_s + bare_s,
                "own_s": now.own_s + own_s + earlier_s,
            }

    def wants_window(self, sampled_steps: int) -> bool:
        """Return whether the open window is long enough to be closed."""
        return sampled_steps >= self._windows.length or self._write_due()

    def add_window(self, window: Window) -> None:
        """Take a closed window; the longer the run, the longer the windows."""
        window = _compact(window)
        self._windows.add(window, window_limit(len(self._watched)))
        if self._sinks:
            self._unwritten.append(window)
        if len(self._unwritten) > UNWRITTEN_LIMIT:
            # The disk is slow, or nobody writes: what waits becomes one window anyway.
            self._unwritten[:2] = [merge_windows(*self._unwritten[:2])]

    def step_done(self, steps: int, skipped_steps: int, backwards: int, sampled: bool) -> None:
        """Take the end of a step, and write what waits if a write is due."""
        self._progress(
            steps=steps,
            skipped_steps=skipped_steps,
            backwards=backwards,
            sampled_steps=self.progress.sampled_steps + sampled,
            **self._cost,
        )
        if self._unwritten and self._write_due():
            self.write()
        self._note_failures()

    def write(self) -> None:
        """Pass on what the sinks have not got yet. Returns at once; ``flush`` waits until they have it."""
        windows = tuple(self._unwritten) if self._sinks else ()
        self._unwritten.clear()
        self._sinks.pass_on((lambda: merge_windows(*windows)) if windows else None, self.progress)
        self._written_at = self._clock()

    def flush(self) -> None:
        """Write, and return when every sink has what was recorded: the session file of a run that goes on is then complete."""
        self.write()
        self._sinks.wait()
        self._note_failures()

    @property
    def is_writing(self) -> bool:
        """Whether something that was passed on is still on its way to the sinks."""
        return self._sinks.busy

    def close(self) -> None:
        """Write the rest and close the sinks; they have all of it when this returns."""
        self._progress(ended=True)
        self.write()
        self._sinks.close()
        self._note_failures()

    def abandon(self) -> list[Sink]:
        """Pass nothing on any more; returns the sinks, neither written nor closed."""
        return self._sinks.abandon()

    def session(self) -> Session:
        """Return all of it so far, as an immutable record."""
        self._note_failures()
        return Session(
            self.info,
            tuple(self._watched),
            self._windows.as_tuple(),
            tuple(self.events),
            tuple(self.notes),
            self.progress,
            self.precision,
            tuple(self.measurements),
        )

    def _write_due(self) -> bool:
        if not self._sinks or self._sinks.busy:
            return False
        return self._clock() >= self._written_at + max(WRITE_INTERVAL_S, WRITE_COST_FACTOR * self._sinks.cost_s)

    def _progress(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    def _note_failures(self) -> None:
        for sentence in self._sinks.failures():
            self.note(sentence)


def _compact(window: Window) -> Window:
    """Return the window as columns where it has many tensors: they take a fifth of the memory and merge ten times as fast."""
    if len(window.tensors) < LEAST_COLUMNS:
        return window
    return replace(window, tensors=TensorColumns.of(window.tensors))
