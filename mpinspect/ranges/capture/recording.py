"""The record of a run so far, bounded in memory, and forwarded to the sinks that store it (session file, TensorBoard)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpinspect.ranges.capture.sinks import Sink, Sinks
from mpinspect.ranges.records import Record
from mpinspect.ranges.session import (
    NEEDS_NO_GRADIENT,
    SKIPPED,
    TAKEN,
    Event,
    Measurement,
    OperandRecord,
    Precision,
    Progress,
    RunInfo,
    ScaleChange,
    Session,
    added_operands,
)
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey
from mpinspect.ranges.windows.window import Window, merge_windows, window_limit
from mpinspect.reporting.streams import printable
from mpinspect.runtime.user_line import warn_user

if TYPE_CHECKING:
    import torch

    from mpinspect.ranges.capture.backward_scale import BackwardScale


class WindowList:
    """A list of fewer than twice ``limit`` windows of similar length. Merges neighbours without changing any total.

    ``window.coarsen`` would merge all windows at once, which takes a second with a thousand tensors. Here the target length
    doubles when there are too many windows, and each window added after that merges one pair of neighbours. Windows begin at
    multiples of it, as those of ``coarsen`` do.

    Args:
        before: the number of sampled steps before the first window.
    """

    def __init__(self, before: int = 0) -> None:
        self._windows: list[Window] = []
        #: For each window, the number of sampled steps before it; last, the number of all.
        self._begins = [before]
        #: Target length of a window, in sampled steps.
        self.length = 1
        #: Index of the first window not yet checked for merging since the length doubled; None if all have been checked.
        self._next_check: int | None = None

    def add(self, window: Window, limit: int) -> None:
        """Add a window that follows the last one, merging neighbours where needed to stay below the limit."""
        while self.length < window.sampled_steps:
            self.length *= 2
        self._windows.append(window)
        # A window without samples has length 1 here, so that such windows are not merged without end.
        self._begins.append(self._begins[-1] + max(window.sampled_steps, 1))
        if len(self._windows) > 1 and self._fit(len(self._windows) - 2):
            self._merge(len(self._windows) - 2)
        if self._next_check is not None:
            self._merge_a_pair()
        while len(self._windows) >= 2 * limit:
            self.length *= 2
            self._next_check = 0
            self._merge_a_pair()

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def ends(self) -> int:
        """The number of sampled steps up to the end of the last window."""
        return self._begins[-1]

    def as_tuple(self) -> tuple[Window, ...]:
        """Return the windows in the order of their steps."""
        return tuple(self._windows)

    def _merge_a_pair(self) -> None:
        for index in range(self._next_check or 0, len(self._windows) - 1):
            if self._fit(index):
                self._merge(index)
                self._next_check = index
                return
        self._next_check = None

    def _fit(self, index: int) -> bool:
        """Return whether a window and the next one begin in the same stretch of the target length."""
        return self._begins[index] // self.length == self._begins[index + 1] // self.length

    def _merge(self, index: int) -> None:
        self._windows[index : index + 2] = [merge_windows(*self._windows[index : index + 2])]
        del self._begins[index + 1]


#: Maximum number of stored events; later ones usually repeat the same problem.
EVENT_LIMIT = 1000
#: Maximum number of stored measurements of all observers.
MEASUREMENT_LIMIT = 1000
#: Maximum number of stored changes of the loss scale; a dynamic scaler makes two every couple of thousand steps.
SCALE_LIMIT = 1000
#: Maximum number of tensors named in one note.
NAMED_LIMIT = 5
#: Minimum time between two writes: in seconds, and as a multiple of a write's cost. Writing thus takes at most 1.5% of the
#: time; TensorBoard's maps take up to 0.5% more.
WRITE_INTERVAL_S = 1.0
WRITE_COST_FACTOR = 67
#: Longest time that the training waits for the first event to be written.
FIRST_EVENT_WAIT_S = 0.1
#: Half the number of windows queued for a write from which on they are merged: a report that is read again from the file of a
#: short run has the steps of the run's own.
UNWRITTEN_LIMIT = 16


class MpinspectWarning(UserWarning):
    """Warns of something that mpinspect can't do or no longer measures; the training continues."""


def warn(sentence: str) -> None:
    """Issue a MpinspectWarning at the user's line; if warnings are errors, suppress it so that the training continues."""
    with contextlib.suppress(MpinspectWarning):
        warn_user(printable(sentence), MpinspectWarning)


class Recording:
    """Stores the windows, events and notes of one run.

    Args:
        info: facts about the run.
        sinks: stores for the record, called on a background thread; a sink that fails is dropped with a warning.
        clock: returns monotonic seconds.
        tell: shows a note to the user, who may never read the report. Called on the recording thread.
        announce: called with each event immediately, on the thread that detected it.
        before_write: called before records are passed on to the sinks, on the thread that trains; must not raise.
        written: called when the sinks have taken the records, on the thread that writes; must not raise.
    """

    def __init__(
        self,
        info: RunInfo,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = warn,
        announce: Callable[[Event], None] = lambda event: None,
        before_write: Callable[[], None] | None = None,
        written: Callable[[], None] | None = None,
    ) -> None:
        self.info = info
        self.progress = Progress()
        self.precision = Precision()
        #: The dtypes in which optimizers stepped the weights, by name, also before a capture was attached again.
        self.stepped_in: dict[str, torch.dtype] = {}
        self.measurements: list[Measurement] = []
        #: Fields of ``progress`` that the ending step updates: the measured cost.
        self._cost: dict[str, float] = {}
        self.notes: list[str] = []
        self.events: list[Event] = []
        #: By step, the last micro-batch whose backward served another model's optimizer, and the loss scale.
        self._aside: dict[int, tuple[int, BackwardScale]] = {}
        self._watched: list[TensorInfo] = []
        self._windows = WindowList()
        self._unwritten = WindowList()
        #: Sampled steps of all windows added.
        self._sampled_steps = 0
        #: A due write is done when the number of sampled steps is a multiple of this; 0 while no write is due.
        self._stride = 0
        self._sinks = Sinks(sinks, written)
        self._clock = clock
        self._began = clock()
        self._tell, self._announce, self._before_write = tell, announce, before_write
        self._written_at = -math.inf

    def watch(self, infos: Sequence[TensorInfo]) -> None:
        self._watched = list(infos)
        self._sinks.each(lambda sink: sink.watched(infos))

    def note(self, sentence: str) -> None:
        """Record a sentence on what could not be measured, and why, for the report; warn the user once per sentence."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        self._sinks.each(lambda sink: sink.note(sentence))
        self._tell(sentence)

    def event(self, event: Event) -> None:
        """Record an event and forward it to the sinks immediately, since the run may fail soon."""
        known = (info.module_type for info in self._watched if info.module == event.module)
        module_type = next(known, self.info.numbered.get(event.module, ""))
        event = replace(self._put_aside(event), module_type=module_type)
        if len(self.events) < EVENT_LIMIT:
            self.events.append(event)
            self._sinks.each(lambda sink: sink.event(event), urgent=True)
            if len(self.events) == 1:
                # The run may fail in this step: wait briefly until the first culprit is on disk.
                self._sinks.wait(FIRST_EVENT_WAIT_S)
            self._announce(event)
        elif len(self.events) == EVENT_LIMIT:
            self.note(f"more than {EVENT_LIMIT} steps were not finite: the later ones are not listed")

    def broken_phases(self) -> tuple[str, ...]:
        """Return, for each step that had one, the phase that was not finite at any loss scale (``Event.broken_phase``)."""
        return tuple({event.step: event.broken_phase for event in self.events if event.broken_phase}.values())

    def aside(self, step: int, micro_batch: int | None, scale: BackwardScale) -> None:
        """Record that a step's backwards up to a micro-batch served another model's optimizer; None revokes the record.

        Stored for eight steps, since events are at most a few steps late.
        """
        self._aside.pop(step, None)
        if micro_batch is not None:
            self._aside = {known: each for known, each in self._aside.items() if known > step - 8}
            self._aside[step] = (micro_batch, scale)

    def _put_aside(self, event: Event) -> Event:
        """Return the event, marked if its gradients served another model's optimizer and were not used by this model's."""
        last, scale = self._aside.get(event.step, (-1, None))
        if scale is None or event.phase != "backward" or event.micro_batch > last or event.story in (TAKEN, SKIPPED):
            return event
        return replace(event, aside=True, loss_scale=scale.number())

    def record(self, record: Record) -> None:
        """Store a typed record."""
        self.measured(record.measurement())

    def measured(self, measurement: Measurement) -> None:
        """Record a measurement; ignore all after the first MEASUREMENT_LIMIT."""
        if len(self.measurements) < MEASUREMENT_LIMIT:
            self.measurements.append(measurement)
            self._sinks.each(lambda sink: sink.measurement(measurement))

    def dtypes(self, precision: Precision) -> None:
        """Set the run's dtypes as far as they are known now; the operands stay."""
        self._set_precision(replace(precision, operands=self.precision.operands))

    def operands(self, operands: Iterable[OperandRecord]) -> None:
        """Add the recipes' losses in a step."""
        self._set_precision(replace(self.precision, operands=added_operands(self.precision.operands, operands)))

    def _set_precision(self, precision: Precision) -> None:
        if precision != self.precision:
            self.precision = precision
            self._sinks.each(lambda sink: sink.precision(precision))

    def unread(self, done: str, tensors: Mapping[str, Sequence[TensorKey]]) -> None:
        """Record the tensors that could not be read: in a note and, if never counted, in the report's coverage.

        Args:
            done: the intended treatment of the tensors: "counted" or "watched".
            tensors: keys of the tensors, by the error that reading them raised.
        """
        for reason, keys in tensors.items():
            names = ", ".join(map(_named, keys[:NAMED_LIMIT]))
            if len(keys) > NAMED_LIMIT:
                names += f" and {len(keys) - NAMED_LIMIT} more"
            self.note(
                f"{names} could not be {done} ({reason}); all other tensors are, and the training is not affected"
            )
        notes = {key: f"could not be counted: {reason}" for reason, keys in tensors.items() for key in keys}
        if notes and done == "counted":
            self.watch([replace(info, note=info.note or notes.get(info.key, "")) for info in self._watched])

    def need_no_gradient(self, gradients: Collection[TensorKey]) -> None:
        """Record the activation gradients that no backward needs, by the calls so far; replaces the earlier record."""
        if gradients != {info.key for info in self._watched if info.note == NEEDS_NO_GRADIENT}:
            notes = {info.key: info.note for info in self._watched if info.note != NEEDS_NO_GRADIENT}
            for key in gradients:
                notes[key] = notes.get(key) or NEEDS_NO_GRADIENT
            self.watch([replace(info, note=notes.get(info.key, "")) for info in self._watched])

    def scale(self, step: int, scale: float | None) -> None:
        """Record the loss scale of a step's backward if it differs from that of the step before.

        Of several backwards of a step the last one counts: a GAN's discriminator has the generator's before its own.
        """
        recorded = self.progress.scales
        scales = recorded[:-1] if recorded and recorded[-1].step == step else recorded
        if scales and scales[-1].scale == scale:
            if scales is not recorded:
                self._progress(scales=scales)
        elif not recorded or recorded[-1] != (step, scale):
            if len(scales) >= SCALE_LIMIT:
                half = SCALE_LIMIT // 2
                scales = (*scales[:half], *scales[1 - half :])
                self.note(
                    f"the loss scale changed more than {SCALE_LIMIT} times: only the first and the last {half} are recorded"
                )
            self._progress(scales=(*scales, ScaleChange(step, scale)))

    def scale_unknown(self, reason: str) -> None:
        """Record, once, that a backward's loss scale can't be determined."""
        if self.progress.scale_known:
            self._progress(scale_known=False, scale_unknown_reason=reason)
            self.note(
                f"the loss scale is not known ({reason}): gradients are counted as they arrive, and no window of scales is given"
            )

    def weights_moved(self, moved: bool | None) -> None:
        """Record whether any update was applied in the run; None if unknown."""
        self._progress(weights_moved=moved)

    def ran_eagerly(self, steps: int = 1) -> None:
        """Add to the number of sampled steps whose compiled regions ran eagerly; 0 only records that this was requested."""
        self._progress(eager_steps=(self.progress.eager_steps or 0) + steps)

    def compiled(self, paths: Sequence[str]) -> None:
        """Add paths of modules inside whose compiled code no hook ran; "" is the whole model."""
        self._progress(compiled=tuple(dict.fromkeys([*self.progress.compiled, *paths])))

    def skips(self, skipped_steps: int) -> None:
        """Record the number of skipped steps known so far."""
        self._progress(skipped_steps=skipped_steps)

    def spent(self, watched: bool, bare_s: float | None, own_s: float, earlier_s: float) -> None:
        """Record the cost of a step, if costs are measured; to be called before the step's ``step_done``.

        Args:
            watched: whether the step was watched.
            bare_s: seconds of bare training credited to the step; None if its start was not observed: no cost is recorded.
            own_s: seconds that the inspector took during the step.
            earlier_s: seconds on the device in earlier steps that have become known now.
        """
        now = self.progress
        self._cost = {"watched_steps": (now.watched_steps or 0) + watched}
        if bare_s is not None:
            self._cost |= {
                "measured_steps": now.measured_steps + 1,
                "bare_s": now.bare_s + bare_s,
                "own_s": now.own_s + own_s + earlier_s,
            }

    def limited(self, steps: int, measured_steps: int, bare_s: float, own_s: float) -> None:
        """Record the cost of the first ``steps`` steps, all watched; ``spent`` adds later steps.

        Args:
            measured_steps: the number of these steps whose cost was measured.
            bare_s, own_s: seconds of bare training and of the inspector in the measured steps.
        """
        self._progress(watched_steps=steps, measured_steps=measured_steps, bare_s=bare_s, own_s=own_s)

    def wants_window(self, sampled_steps: int) -> bool:
        """Return whether the open window should be closed: it is long enough, or a write is due."""
        return sampled_steps >= self._windows.length or self._write_due(sampled_steps)

    def add_window(self, window: Window) -> None:
        """Add a closed window, merging earlier windows if there are too many."""
        self._sampled_steps += window.sampled_steps
        self._windows.add(window, window_limit(len(self._watched)))
        if self._sinks:
            self._unwritten.add(window, UNWRITTEN_LIMIT)

    def step_done(self, steps: int, skipped_steps: int, backwards: int, sampled: bool) -> None:
        """Record the end of a step, and write pending windows if a write is due."""
        self._progress(
            steps=steps,
            skipped_steps=skipped_steps,
            backwards=backwards,
            sampled_steps=self.progress.sampled_steps + sampled,
            elapsed_s=round(self._clock() - self._began, 3),
            **self._cost,
        )
        if len(self._unwritten) and self._write_due():
            self.write()
        self._note_failures()

    def write(self) -> None:
        """Forward pending windows and the progress to the sinks; return immediately (``flush`` waits for the sinks)."""
        if self._before_write is not None:
            self._before_write()
        unwritten, self._unwritten = self._unwritten, WindowList(self._unwritten.ends)
        self._sinks.pass_on(unwritten.as_tuple(), self.progress)
        self._written_at = self._clock()
        self._stride = 0

    def flush(self) -> None:
        """Write, and wait until every sink has all records, so that the session file is complete while the run continues."""
        self.write()
        self._sinks.wait()
        self._note_failures()

    @property
    def is_writing(self) -> bool:
        """Whether any forwarded records have not reached the sinks yet."""
        return self._sinks.busy

    def close(self) -> None:
        """Write all pending records, and return when the sinks have received them and are closed."""
        self._progress(ended=True)
        self.write()
        self._sinks.close()
        self._note_failures()

    def abandon(self) -> list[Sink]:
        """Stop forwarding, and return the sinks without writing to them or closing them."""
        return self._sinks.abandon()

    def session(self) -> Session:
        """Return everything recorded so far, as an immutable session."""
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

    def _write_due(self, open_steps: int = 0) -> bool:
        """Return whether to write now; ``open_steps`` is the number of sampled steps in the open window.

        The clock decides when a write is due. It then waits until the number of sampled steps is a multiple of the largest power
        of two that the unwritten steps reach: runs of different speed end most windows at the same steps, and can be compared.
        """
        if not self._sinks or self._sinks.busy:
            return False
        if self._clock() < self._written_at + max(WRITE_INTERVAL_S, WRITE_COST_FACTOR * self._sinks.cost_s):
            return False
        if not self._stride:
            unwritten = open_steps + sum(window.sampled_steps for window in self._unwritten.as_tuple())
            self._stride = 1 << (max(unwritten, 1).bit_length() - 1)
        return (self._sampled_steps + open_steps) % self._stride == 0

    def _progress(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    def _note_failures(self) -> None:
        for sentence in self._sinks.failures():
            self.note(sentence)


def _named(key: TensorKey) -> str:
    if not key.name:
        return f"the model's own {key.kind}"
    return f"the {key.kind.replace('_', ' ')} of {key.name!r}"
