"""An observer that counts the steps in which a gradient scaler scales a loss for the first time."""

from __future__ import annotations

import weakref
from typing import Any

from mpinspect.ranges import records
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.recording import Recording

#: The number of steps with a new scaler at which it is recorded for the first time: a process may be killed before its end.
_MANY = 3
#: The number of observed steps: an observer at work takes some time of every call of a module.
_MOST_STEPS = 64


class NewScalers(Observer):
    """Counts steps with a scaler, and those in which it was new. Works in the first sampled or watched steps; reads no tensor.

    Args:
        recording: receives the measurement.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # A deleted scaler's id is soon reused.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_scaled = self._is_new = False
        self._seen = self._steps = self._new = self._first = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in the first steps whose losses are observed anyway."""
        self.at_work = (sampled or watched) and self._seen < _MOST_STEPS
        self._seen += self.at_work
        self._is_scaled = self._is_new = False

    def scaler_used(self, scaler: Any) -> None:
        """Remember whether an enabled scaler is used in this step, and whether one was never used before."""
        if scaler.is_enabled():
            self._is_scaled = True
            self._is_new |= scaler not in self._known
            self._known.add(scaler)

    def end_step(self, step: int, sampled: bool) -> None:
        """Count the step; record the counts once the first steps have shown that scalers are made anew."""
        if not self._is_scaled:
            return
        self._first = self._first if self._steps else step
        self._steps += 1
        self._new += self._is_new
        if self._new == self._steps == _MANY:
            self._record()

    def run_ends(self) -> None:
        """Record the counts of the run."""
        if self._new >= _MANY:
            self._record()

    def _record(self) -> None:
        self._recording.record(records.NewScalers(step=self._first, new=self._new, steps=self._steps))
