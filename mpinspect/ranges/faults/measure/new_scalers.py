"""An observer that counts the steps with a newly made gradient scaler."""

from __future__ import annotations

import weakref
from typing import Any

from mpinspect.ranges import records
from mpinspect.ranges.faults.measure.measuring import Measuring, Run

#: Number of steps with a new scaler before the first record, which does not wait for the run's end: it may be killed.
_MANY = 3
#: Maximum number of observed steps, since an active observer costs time at every call of a module.
_MOST_STEPS = 64


class NewScalers(Measuring):
    """Counts steps with a scaler, and steps with a new one. Works in the first sampled or watched steps; reads no tensor."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
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
        """Remember whether this step uses an enabled scaler, and whether it uses one for the first time."""
        if scaler.is_enabled():
            self._is_scaled = True
            self._is_new |= scaler not in self._known
            self._known.add(scaler)

    def end_step(self, step: int, sampled: bool) -> None:
        """Count the step; record the counts once enough steps had a new scaler."""
        if not self._is_scaled:
            return
        if not self._steps:
            self._first = step
        self._steps += 1
        self._new += self._is_new
        if self._new == self._steps == _MANY:
            self._tell()

    def run_ends(self) -> None:
        """Record the counts of the run."""
        if self._new >= _MANY:
            self._tell()

    def _tell(self) -> None:
        self._record(records.NewScalers(step=self._first, new=self._new, steps=self._steps))
