"""Logs a run to an experiment tracker: scalars during the run, the report's page at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report.scalars import ScalarSink
from mpinspect.ranges.session import Progress
from mpinspect.reporting.active_run import ActiveRun
from mpinspect.reporting.trackers import GROUP, Tracker
from mpinspect.runtime.background import Background

#: The name of the page.
PAGE = "report.html"
#: Maximum number of seconds that the end of a run waits for an unresponsive tracker.
PATIENCE_S = 10.0


class TrackerSink(ScalarSink):
    """Passes a run's scalars to a tracker, on its own thread, so that a slow server does not delay the files.

    While the tracker is busy, the newest row waits and older rows are dropped.
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
        """Log the scalars of the windows added since the last call. Raises any exception of the tracker since then."""
        super().progress(progress)
        self._raise()
        if self._row is not None and not self._background.busy:
            self._background.call(self._log)

    def settle(self) -> None:
        """Wait until everything is logged. Raises the tracker's exception, or TimeoutError if the tracker does not answer."""
        self._background.wait(PATIENCE_S)
        if self._row is not None and not self._background.busy:
            self._background.call(self._log, urgent=True)
            self._background.wait(PATIENCE_S)
        self._raise()
        if self._background.busy:
            raise TimeoutError(f"the tracker has not answered for {PATIENCE_S:g} s")

    def close(self) -> None:
        """Wait until everything is logged; raises like ``settle``."""
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


class Tracking:
    """A tracker and the sink that logs to it.

    Args:
        tracker: a tracker's package by name, to log to the run that the script has open; or a Tracker.
        before_end: called just before the script's open run ends.

    Raises:
        TypeError: ``tracker`` is neither.
        ValueError, ImportError: no tracker has this name, or its package is not installed.
    """

    def __init__(self, tracker: str | Tracker, before_end: Callable[[], None]) -> None:
        if not isinstance(tracker, (str, Tracker)):
            raise TypeError(
                f"tracker={tracker!r}: give its name ('wandb', 'mlflow', 'trackio') or an object with the methods "
                "scalars(step, values) and artifact(path)"
            )
        #: The run that the script has open, if the tracker was specified by name.
        self._run: ActiveRun | None = None
        if isinstance(tracker, str):
            tracker = self._run = ActiveRun(tracker, before_end)
        self._tracker = tracker
        self.sink = TrackerSink(self._tracker)

    def find_run(self) -> None:
        """Find the run that the calling thread would log to, if the tracker was specified by name; never raises."""
        if self._run is not None:
            self._run.find_run()

    def hand_over(self, report: Callable[[], RangeReport]) -> Iterator[str]:
        """Send the report's page to the tracker; yield sentences on failures instead of raising."""
        if self._run is not None:
            if self._run.missing:
                yield self._run.missing
            if not self._run.is_open:
                return
        try:
            with tempfile.TemporaryDirectory(prefix="mpinspect-") as folder:
                self._tracker.artifact(report().save(Path(folder) / PAGE))
        except Exception as error:
            yield f"the tracker did not take the report's page: {error!r}"

    def leave(self) -> None:
        """Cancel the handing over, even if the tracker's run ends later."""
        if self._run is not None:
            self._run.leave()
