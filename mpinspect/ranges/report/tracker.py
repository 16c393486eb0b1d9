"""Logs the scalars of a run to an experiment tracker while it is recorded."""

from __future__ import annotations

from mpinspect.ranges.report.scalars import ScalarSink
from mpinspect.ranges.session import Progress
from mpinspect.reporting.trackers import GROUP, Tracker
from mpinspect.runtime.background import Background

#: Most seconds that the end of a run waits for a tracker that does not answer.
PATIENCE_S = 10.0


class TrackerSink(ScalarSink):
    """Passes a run's scalars on to a tracker, on a thread of its own: a server that is slow to answer delays no file.

    While the tracker is busy the newest row waits, and older ones are dropped.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._background = Background()
        self._row: tuple[int, dict[str, float]] | None = None
        self._fault: Exception | None = None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log the values soon."""
        self._row = step, {f"{GROUP}/{name}": value for name, value in values.items()}

    def progress(self, progress: Progress) -> None:
        """Log the windows that came before. Raises what the tracker raised since the last call."""
        super().progress(progress)
        self._raise()
        if self._row is not None and not self._background.busy:
            self._background.call(self._log)

    def settle(self) -> None:
        """Wait until all is logged. Raises what the tracker raised, or TimeoutError if it does not answer."""
        self._background.wait(PATIENCE_S)
        if self._row is not None and not self._background.busy:
            self._background.call(self._log, urgent=True)
            self._background.wait(PATIENCE_S)
        self._raise()
        if self._background.busy:
            raise TimeoutError(f"the tracker has not answered for {PATIENCE_S:g} s")

    def close(self) -> None:
        """Wait until all is logged, as ``settle``."""
        self.settle()

    def _raise(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _log(self) -> None:
        row, self._row = self._row, None
        if row is None:
            return
        try:
            self._tracker.scalars(*row)
        except Exception as error:
            self._fault = error
