"""What an Inspector does with a tracker: the sink for its scalars, and the report's page at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report.tracker import TrackerSink
from mpinspect.reporting.active_run import ActiveRun
from mpinspect.reporting.trackers import Tracker

#: The name of the page.
PAGE = "report.html"


class Tracking:
    """A tracker and the sink that logs to it.

    Args:
        tracker: the name of a tracker's package, for the run that the script has open, or a Tracker.
        before_end: called just before such a run ends.

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
        self._tracker = ActiveRun(tracker, before_end) if isinstance(tracker, str) else tracker
        self.sink = TrackerSink(self._tracker)

    def look(self) -> None:
        """Find the run that the calling thread would log to, if the tracker was given by name; never raises."""
        look: Callable[[], None] | None = getattr(self._tracker, "look", None)
        if look is not None:
            look()

    def hand_over(self, report: Callable[[], RangeReport]) -> Iterator[str]:
        """Give the tracker the report's page; yield sentences on what went wrong, and raise nothing."""
        run = self._tracker if isinstance(self._tracker, ActiveRun) else None
        if run is not None and run.missing:
            yield run.missing
        if run is not None and not run.is_open:
            return
        try:
            with tempfile.TemporaryDirectory(prefix="mpinspect-") as folder:
                self._tracker.artifact(report().save(Path(folder) / PAGE))
        except Exception as error:
            yield f"the tracker did not take the report's page: {error!r}"

    def leave(self) -> None:
        """Hand nothing over any more, also where the tracker's run ends later."""
        if isinstance(self._tracker, ActiveRun):
            self._tracker.leave()
