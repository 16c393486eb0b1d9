"""Recorder: for training loops of any framework. It is handed arrays and makes the session that an Inspector makes."""

from __future__ import annotations

import os
import platform
import sys
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpinspect.numeric.formats import FormatLike
from mpinspect.ranges.analysis import analyse
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.at_exit import print_report
from mpinspect.ranges.capture.arrays.capture import ArrayCapture
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.kinds import KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import RunInfo, Session, now
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.runtime.version import __version__

__all__ = ["Recorder"]

_FRAMEWORKS = ("tensorflow", "keras", "jax", "paddle", "mxnet", "cupy", "torch")


class Recorder:
    """Takes the gradients of any framework as arrays, and says of them what an Inspector says of a torch model.

        with mpinspect.Recorder("runs/a") as recorder:
            for step, batch in enumerate(batches):
                gradients = ...                                   # as they are, the loss scale still in them
                recorder.observe("", gradients, step=step, loss_scale=scale)
        print(recorder.report())

    Counting is done in NumPy; torch is imported for the TensorBoard log alone, so only with a ``log_dir``. No array is kept or
    changed. Nothing that ``observe`` is given makes it raise: it warns, once, and goes on.

    Args:
        log_dir: directory for the session file and the TensorBoard log; None keeps everything in memory. If it holds
            another run, the next free name beside it is taken (``runs/a-2``), with a warning.
        model: its name, for the report.
        every: sample every n-th step (in the others ``observe`` returns at once), or a Schedule that says which.

    Raises:
        ValueError: ``every`` is no whole number of 1 or more.
    """

    def __init__(self, log_dir: str | Path | None = None, *, model: str = "", every: int | Schedule = 1) -> None:
        schedule = every if isinstance(every, Schedule) else Schedule(every)
        each = schedule.every
        info = RunInfo(str(model), now(), KINDS, each, watch=each == 1, versions=_versions())
        self.log_dir, sinks, troubles = open_sinks(log_dir, info)
        self._recording = Recording(info, sinks)
        self._capture = ArrayCapture(self._recording, schedule)
        # Callbacks of some frameworks run on threads of their own.
        self._lock = threading.RLock()
        for trouble in troubles:
            self._recording.note(trouble)
        if sinks:
            # A script that forgets close() still gets its last second, and a recorder that it drops is closed.
            weakref.finalize(self, _close, self._capture, self._recording, self._lock, os.getpid())

    # -- recording --------------------------------------------------------------------------------------------------

    @property
    def sampled(self) -> bool:
        """Whether the open step is sampled; between steps, whether the next one will be."""
        with self._lock:
            return self._capture.sampled

    def observe(
        self,
        name: str,
        array: Any,
        *,
        kind: str = WEIGHT_GRADIENT,
        step: Any = None,
        loss_scale: Any = 1.0,
        passed_through: str | None = None,
    ) -> None:
        """Count an array. At sampled steps it waits for the device that the array lies on. Never raises an Exception.

        Args:
            name: dotted path of the parameter (of the module, for the activation kinds); what is no text is made one.
            array: of NumPy, TensorFlow, JAX, Paddle, MXNet, CuPy, torch or any other library with DLPack; also a dict, list or
                pytree of arrays, whose keys are joined to the name by dots. None is passed over.
            kind: "weight_gradient", "activation_gradient", "activation", "weight" or "update".
            step: number of the training step, whole and below 2^63; a larger one than before ends the step before. None: the
                open step, which ``next_step`` ends.
            loss_scale: what a gradient is still multiplied by: a number (or a scalar array), which is divided out; None if it
                is not known. Other kinds are not multiplied by it.
            passed_through: format that the values were rounded to before they came ("float16", "bfloat16", ...), where the
                array's own dtype does not tell: a float32 copy of an FP16 gradient.
        """
        with self._lock:
            if self._recording.progress.ended:
                self._recording.note("arrays came after close(): they are not recorded")
            else:
                self._capture.observe(name, array, kind, step, loss_scale, passed_through)

    def next_step(self, *, skipped: bool | None = None) -> None:
        """The step is over; what is observed next belongs to another. ``skipped``: whether its update was skipped, if known."""
        with self._lock:
            if not self._recording.progress.ended:
                self._capture.next_step(skipped)

    def close(self) -> None:
        """End the open step and close the files. Twice does nothing."""
        _close(self._capture, self._recording, self._lock)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None and not isinstance(error, (GeneratorExit, SystemExit)):
            print_report(self.report)

    # -- reading ----------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return everything recorded so far, the open step included; the step goes on."""
        with self._lock:
            return self._capture.session()

    def report(self, format: FormatLike | None = None) -> RangeReport:
        """Return what the counts say: verdict, findings, ranges by layer, the suggested loss scale.

        Args:
            format: judged against it; None for FP16, or BF16 where that is what the arrays are.

        Raises:
            ValueError: ``format`` names none that is known.
        """
        return analyse(self.session(), format)

    def __repr__(self) -> str:
        """Return how far it is, in one line."""
        progress = self._recording.progress
        where = "" if self.log_dir is None else f", writes to {self.log_dir}"
        state = "closed" if progress.ended else "open"
        return f"<Recorder: {state}, {progress.steps} steps, {progress.sampled_steps} sampled{where}>"


def _close(capture: ArrayCapture, recording: Recording, lock: threading.RLock, process: int | None = None) -> None:
    """Twice does nothing. ``process``: the one whose files they are; in its forked children nothing is done."""
    if process not in (None, os.getpid()):
        return
    with lock:
        if not recording.progress.ended:
            capture.finish()
            recording.close()


def _versions() -> dict[str, str]:
    """Ours, and those of the frameworks that are loaded."""
    loaded = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in _FRAMEWORKS}
    found = {name: version for name, version in loaded.items() if version}
    return {"mpinspect": __version__, "numpy": np.__version__, **found, "python": platform.python_version()}
