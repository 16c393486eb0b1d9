"""The capture of a recorder: counts arrays step by step, and passes windows, events and notes to a Recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpinspect.ranges.capture.arrays.given import ArgumentError, Given, leaves, quoted, step_number, understand
from mpinspect.ranges.capture.arrays.non_finite import NonFiniteWatch, owner
from mpinspect.ranges.capture.arrays.samples import ArraySample, sample
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT_KINDS
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow, add_counts, merge_tensor_windows
from mpinspect.ranges.windows.window import Window


@dataclass
class OpenStep:
    """The samples of the open step."""

    number: int
    sampled: bool
    parts: dict[TensorKey, list[TensorWindow]] = field(default_factory=dict)
    #: The loss scales of the step's gradients, in the order seen.
    scales: dict[float | None, None] = field(default_factory=dict)
    peak: int | None = None

    def add(self, sample: ArraySample) -> None:
        self.parts.setdefault(sample.key, []).append(sample.window)
        if sample.key.kind in GRADIENT_KINDS:
            self.scales[sample.scale] = None
            if sample.peak is not None and (self.peak is None or sample.peak > self.peak):
                self.peak = sample.peak


def _window(steps: Sequence[OpenStep]) -> Window:
    """Return steps as one window, merging their samples tensor by tensor."""
    parts: dict[TensorKey, list[TensorWindow]] = {}
    for step in steps:
        for key, samples in step.parts.items():
            parts.setdefault(key, []).extend(samples)
    tensors = {key: merge_tensor_windows(samples) for key, samples in parts.items()}
    peaks = add_counts({step.peak: 1} for step in steps if step.peak is not None)
    return Window(steps[0].number, steps[-1].number, len(steps), tensors, peaks)


class StepNumbers:
    """Assigns step numbers that always increase, even if the caller's numbers restart at 0 in each epoch.

    ``number`` is the number of the open step, or of the last one; ``count`` is how many steps have begun.
    """

    def __init__(self) -> None:
        self.number = -1
        self.first = 0
        self.count = 0
        self.is_open = False
        #: The caller's number of this step; None if unknown.
        self.given: int | None = None

    @property
    def span(self) -> int:
        """The number of steps from the first to this one, including steps without observations."""
        return self.number - self.first + 1 if self.count else 0

    def belongs(self, given: int | None) -> bool:
        """Return whether an observation with this number belongs to the open step."""
        return self.is_open and (given is None or self.given is None or given == self.given)

    def went_back(self, given: int | None) -> bool:
        """Return whether this step number is smaller than the caller's number of the latest step; False if either is None."""
        return given is not None and self.given is not None and given < self.given

    def stay(self, given: int | None) -> None:
        """Record the number passed with another observation of the open step, if the step has no number yet."""
        if self.given is None:
            self.given = given

    def begin(self, given: int | None) -> None:
        """Begin the next step; ``given``: the caller's number for it, if any."""
        if not self.count:
            self.number = self.first = max(given or 0, 0)
        elif given is None or self.given is None:
            self.number += 1
        else:
            self.number += max(given - self.given, 1)
        self.count += 1
        self.is_open = True
        self.given = given

    def end(self) -> None:
        self.is_open = False


class ArrayCapture:
    """Counts the arrays passed to it. No method raises an Exception, even for invalid arguments.

    Args:
        recording: receives the captured records.
        schedule: decides which of the steps that have begun are sampled.
    """

    def __init__(self, recording: Recording, schedule: Schedule) -> None:
        self._recording = recording
        self._schedule = schedule
        self._numbers = StepNumbers()
        self._step: OpenStep | None = None
        self._watch = NonFiniteWatch()
        #: The ended steps of the open window that have counts.
        self._ended: list[OpenStep] = []
        self._infos: dict[TensorKey, TensorInfo] = {}
        self._announced: tuple[TensorInfo, ...] = ()
        self._faults: set[str] = set()
        self._skipped = self._backwards = 0

    @property
    def sampled(self) -> bool:
        """Whether the open step is sampled; between steps, whether the next one will be."""
        return self._step.sampled if self._step is not None else self._schedule.samples(self._numbers.count)

    # -- arrays -------------------------------------------------------------------------------------------------------

    def observe(self, name: str, array: Any, kind: str, step: Any, loss_scale: Any, passed_through: str | None) -> None:
        """Count an array, or every array in a nested structure; see ``Recorder.observe``."""
        with self._guarded(name):
            if self._enter(step).sampled:
                self._check_name(name)
                given = understand(kind, loss_scale, passed_through)
                self._check_scale(given)
                for leaf, part in leaves(str(name), array):
                    with self._guarded(leaf, kind):
                        self._take(sample(TensorKey(leaf, kind), part, given))

    def _check_name(self, name: Any) -> None:
        """Record a note if the name is neither a string nor an integer (such as a layer's number)."""
        if not isinstance(name, (str, int)):
            kind = f"name of type {type(name).__name__}"
            self._note_once(kind, f"name={quoted(name)} is not a string: it is recorded under {quoted(str(name))}")

    def _check_scale(self, given: Given) -> None:
        """Record a note if the loss scale is unknown, once for each reason."""
        if given.unknown and self._recording.progress.scale_known:
            self._faults.add(f"scale {given.unknown_kind}")
            self._recording.scale_unknown(given.unknown)
        elif given.unknown:
            sentence = f"the loss scale is not known at step {self._numbers.number} either ({given.unknown})"
            self._note_once(f"scale {given.unknown_kind}", sentence)

    def _note_once(self, kind: str, sentence: str) -> None:
        if kind not in self._faults:
            self._faults.add(kind)
            self._recording.note(sentence)

    def _take(self, taken: ArraySample) -> None:
        if self._step is None:
            return
        self._step.add(taken)
        self._watch.add(taken)
        known = self._infos.get(taken.key)
        if known is None or known.note:
            self._announce(taken.key, taken.shape, taken.dtype)

    def _announce(self, key: TensorKey, shape: tuple[int, ...] = (), dtype: str = "", note: str = "") -> None:
        if key.kind in (ACTIVATION, ACTIVATION_GRADIENT):
            # These vary.
            shape, dtype = (), ""
        self._infos[key] = TensorInfo(key.name, key.kind, owner(key), "", shape, dtype, note)

    # -- steps --------------------------------------------------------------------------------------------------------

    def next_step(self, skipped: bool | None) -> None:
        """End the open step; without an open step, record an empty one."""
        with self._guarded("next_step"):
            if self._step is None:
                self._begin_step(None)
            self._end_step(skipped)

    def finish(self) -> None:
        """End the open step and pass the last window to the recording; no more arrays follow."""
        with self._guarded("close"):
            self._end_step(None)
            self._close_window()

    def _enter(self, step: Any) -> OpenStep:
        """Return the step of an observation with this number, beginning a new step if needed."""
        given = step_number(step)
        if self._step is not None and self._numbers.belongs(given):
            self._numbers.stay(given)
            return self._step
        if self._numbers.went_back(given):
            self._recording.note(
                f"the step number went back from {self._numbers.given} to {given}: the numbering continues without a gap. Pass "
                "numbers that increase over the whole run"
            )
        self._end_step(None)
        return self._begin_step(given)

    def _begin_step(self, given: int | None) -> OpenStep:
        sampled = self._schedule.samples(self._numbers.count)
        self._numbers.begin(given)
        self._step = OpenStep(self._numbers.number, sampled)
        return self._step

    def _end_step(self, skipped: bool | None) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._numbers.end()
        infos = tuple(self._infos.values())
        if infos != self._announced:
            self._recording.watch(infos)
            self._announced = infos
        event = self._watch.end_step(step.number, skipped)
        if event is not None:
            self._recording.event(event)
        for scale in step.scales:
            self._recording.scale(step.number, scale)
        if step.parts:
            self._ended.append(step)
        if self._recording.wants_window(len(self._ended)):
            self._close_window()
        self._skipped += bool(skipped)
        self._backwards += bool(step.scales)
        self._recording.step_done(self._numbers.span, self._skipped, self._backwards, bool(step.parts))

    def _close_window(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._recording.add_window(_window(ended))

    # -- reading ------------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return everything recorded so far, including the open step, which stays open."""
        session = self._recording.session()
        session = replace(session, watched=tuple(self._infos.values()))
        if self._ended:
            session = replace(session, windows=(*session.windows, _window(self._ended)))
        step = self._step
        if step is None:
            return session
        if step.parts:
            session = replace(session, windows=(*session.windows, _window([step])))
        if event := self._watch.judge(step.number, None):
            session = replace(session, events=(*session.events, event))
        progress = replace(
            session.progress,
            steps=self._numbers.span,
            sampled_steps=session.progress.sampled_steps + bool(step.parts),
            backwards=self._backwards + bool(step.scales),
        )
        return replace(session, progress=progress)

    # -- faults -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self, name: str, kind: str = "") -> Iterator[None]:
        """Suppress any Exception and note it, once per reason; an array that it concerns is listed as not recorded."""
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, (TypeError, ValueError)) else repr(error)
            reason = " ".join(reason.split())[:400]
            key = TensorKey(name, kind)
            if kind and key not in self._infos:
                self._announce(key, note=f"not recorded: {reason}")
            what = error.kind if isinstance(error, ArgumentError) else reason
            self._note_once(what, f"{name!r} is not recorded ({reason}); the training is not affected")
