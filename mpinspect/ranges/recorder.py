"""Recorder: builds the same session as an Inspector from arrays passed in by a training loop of any framework."""

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
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.at_exit import print_report
from mpinspect.ranges.capture.arrays.capture import ArrayCapture
from mpinspect.ranges.capture.recording import Recording
from mpinspect.ranges.capture.steps import Schedule
from mpinspect.ranges.kinds import KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.report.tensorboard_curves import MOST_CURVES, check_curves
from mpinspect.ranges.session import RunInfo, Session
from mpinspect.ranges.store.sinks import open_sinks
from mpinspect.reporting.words import filled
from mpinspect.runtime.appending import timestamp
from mpinspect.runtime.finalizing import until_finalized
from mpinspect.runtime.version import __version__

__all__ = ["Recorder"]

_FRAMEWORKS = ("tensorflow", "keras", "jax", "paddle", "mxnet", "cupy", "torch")


class Recorder:
    """Records gradients of any framework, passed as arrays, and reports on them as an Inspector does on a torch model.

    A loop::

        with mpinspect.Recorder("runs/a") as recorder:
            for step, batch in enumerate(batches):
                gradients = ...                                   # as they are, the loss scale still in them
                recorder.observe("", gradients, step=step, loss_scale=scale)
        print(recorder.report())

    Counting is done in NumPy; torch is imported only for the TensorBoard log, so only with a ``log_dir``. Arrays are neither
    stored nor changed. ``observe`` never raises on invalid arguments: it warns once and continues.

    Args:
        log_dir: directory for the session file and the TensorBoard log; None stores everything in memory. If it holds another
            run, the next free sibling name is used (``runs/a-2``), with a warning.
        model: name of the model, for the report.
        every: sample every n-th step (in other steps ``observe`` returns at once), or a Schedule that selects the
            steps.
        curves: number of tensors of each kind that have scalars of their own in the TensorBoard log, those that lose most to
            flushing; None: all.

    Raises:
        ValueError: ``every`` is not an integer of at least 1, or ``curves`` is below 0.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        *,
        model: str = "",
        every: int | Schedule = 1,
        curves: int | None = MOST_CURVES,
    ) -> None:
        check_curves(curves)
        schedule = every if isinstance(every, Schedule) else Schedule(every)
        each = schedule.every
        info = RunInfo(str(model), timestamp(), KINDS, each, watch=each == 1, versions=_versions())
        self.log_dir, sinks, troubles = open_sinks(log_dir, info, curves)
        self._recording = Recording(info, sinks)
        self._capture = ArrayCapture(self._recording, schedule)
        # Some frameworks run callbacks on their own threads.
        self._lock = threading.RLock()
        for trouble in troubles:
            self._recording.note(trouble)
        if sinks:
            # Close the recorder when it is garbage-collected or the script ends, so that no data is lost without close().
            weakref.finalize(self, _close, self._capture, self._recording, self._lock, os.getpid())

    # -- recording --------------------------------------------------------------------------------------------------

    @property
    def sampled(self) -> bool:
        """Whether the open step is sampled; between steps, whether the next step will be sampled."""
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
        """Count an array's values. In sampled steps, waits for the array's device. Never raises an Exception.

        Args:
            name: dotted path of the parameter (of the module, for the activation kinds); other objects are converted to
                str.
            array: an array of NumPy, TensorFlow, JAX, Paddle, MXNet, CuPy, torch or any other library with DLPack; or a
                dict, list or pytree of arrays, whose keys are appended to the name with dots. None is ignored.
            kind: "weight_gradient", "activation_gradient", "activation", "weight" or "update".
            step: number of the training step, an integer below 2^63; a larger number than before ends the previous
                step. None means the open step, which ``next_step`` ends.
            loss_scale: the loss scale still contained in a gradient, a number or scalar array, which is divided out;
                None if unknown. It does not apply to the other kinds.
            passed_through: format that the values were rounded to earlier ("float16", "bfloat16", ...), if the array's dtype
                does not show it, as in a float32 copy of an FP16 gradient.
        """
        with self._lock:
            if self._recording.progress.ended:
                self._recording.note("arrays that are observed after close() are not recorded")
            else:
                self._capture.observe(name, array, kind, step, loss_scale, passed_through)

    def next_step(self, *, skipped: bool | None = None) -> None:
        """End the open step. ``skipped``: whether the step's optimizer update was skipped; None if unknown."""
        with self._lock:
            if not self._recording.progress.ended:
                self._capture.next_step(skipped)

    def close(self) -> None:
        """End the open step and close the files. Idempotent."""
        _close(self._capture, self._recording, self._lock)

    def __enter__(self) -> Recorder:
        return self

    @until_finalized
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None and not isinstance(error, (GeneratorExit, SystemExit)):
            print_report(self.report)

    # -- reading ----------------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Return everything recorded so far, including the open step, which stays open."""
        with self._lock:
            return self._capture.session()

    def report(self, format: FormatLike | None = None) -> RangeReport:
        """Return the report: verdict, findings, ranges by layer and the suggested loss scale.

        Args:
            format: the format to judge the arrays against; None for FP16, or BF16 if the arrays are BF16.

        Raises:
            ValueError: ``format`` is the name of no known format.
        """
        return analyse(self.session(), format)

    def __repr__(self) -> str:
        """Return the recorder's state and progress in one line."""
        progress = self._recording.progress
        where = filled(", writes to {}", self.log_dir)
        state = "closed" if progress.ended else "open"
        return f"<Recorder: {state}, {progress.steps} steps, {progress.sampled_steps} sampled{where}>"


def _close(capture: ArrayCapture, recording: Recording, lock: threading.RLock, process: int | None = None) -> None:
    """Close the recording unless it is closed already, or this process is not ``process``, which owns the files."""
    if process not in (None, os.getpid()):
        return
    with lock:
        if not recording.progress.ended:
            capture.finish()
            recording.close()


def _versions() -> dict[str, str]:
    """Return the versions of mpinspect, NumPy, Python and the frameworks imported so far."""
    loaded = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in _FRAMEWORKS}
    found = {name: version for name, version in loaded.items() if version}
    return {"mpinspect": __version__, "numpy": np.__version__, **found, "python": platform.python_version()}
