"""The tracker's run that a script has open at the moment, wherever the script itself would log."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpinspect.reporting.trackers import GROUP, PACKAGES, MlflowRun, TrackioRun, WandbRun, check_name


class ActiveRun:
    """A Tracker that logs to the run that is open; scalars that come while none is open are dropped.

    Args:
        name: of the tracker's package, as in PACKAGES. Where the script does not import it, nothing does.
        before_end: called just before a run of W&B ends, while it still takes what is logged. The others take it later.

    Raises:
        ValueError, ImportError: as ``check_name``.
    """

    def __init__(self, name: str, before_end: Callable[[], None]) -> None:
        self._name = check_name(name)
        self._before_end = before_end
        #: The package's own object, and what logs to it; both None while no run is open.
        self._open: Any = None
        self._tracker: WandbRun | MlflowRun | TrackioRun | None = None
        #: The parts that have logged to the open run, in this order.
        self._parts: list[RunPart] = []
        self._process = os.getpid()
        self._fault: Exception | None = None
        #: Whether any run was found.
        self.found = False

    @property
    def missing(self) -> str:
        """A sentence on what is missing if no run was found."""
        package = PACKAGES[self._name]
        return f"nothing was logged to {package.title}: the training opened no run of it ({package.begin})"

    @property
    def is_open(self) -> bool:
        """Whether there is a run that takes what is logged."""
        return self._tracker is not None

    def look(self) -> None:
        """Find the run to log to, as the calling thread sees it; never raises."""
        package = sys.modules.get(self._name)
        if package is None or os.getpid() != self._process:
            return
        try:
            run = PACKAGES[self._name].open(package)
            if run is not None and run is not self._open and not getattr(run, "disabled", False):
                self._bind(run)
        except Exception as error:
            self._fault = error

    def part(self, name: str) -> RunPart:
        """Return a Tracker for one of several models; in each run all but the first that logs have their name in front."""
        return RunPart(self, name)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values. Raises whatever the package raises, or raised when the run was found."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if self._tracker is not None:
            self._tracker.scalars(step, values)

    def artifact(self, path: Path) -> None:
        """Keep a page. Raises whatever the package raises."""
        if self._tracker is not None:
            self._tracker.artifact(path)

    def leave(self) -> None:
        """Call ``before_end`` no more: nothing will be handed over, but for rows that wait for the end of a run."""
        self._before_end = lambda: None

    def end(self) -> None:
        """Log the rows that wait for the end of a run, since the process ends; never raises an Exception."""
        self.leave()
        self._ends()

    def name_in_run(self, part: RunPart, name: str) -> str:
        """Return the name that a value of a part has in the open run."""
        if part not in self._parts:
            self._parts.append(part)
        return name if part is self._parts[0] else name.replace(f"{GROUP}/", f"{GROUP}/{part.name}/", 1)

    def _bind(self, run: Any) -> None:
        if self._tracker is not None:
            self._tracker.release()
        self._tracker = PACKAGES[self._name].log_to(run)
        self._open, self._parts, self.found = run, [], True
        if isinstance(self._tracker, WandbRun):
            # Exit handlers run last in, first out: before W&B's own, which was registered when the run began.
            atexit.unregister(self._ends)
            atexit.register(self._ends)
            self._tracker.before_end(self._ends)

    def _ends(self) -> None:
        """Hand over what is left to a run that is about to end; never raises an Exception."""
        tracker = self._tracker
        if tracker is None or os.getpid() != self._process:
            return
        atexit.unregister(self._ends)
        try:
            self._before_end()
            tracker.release()
        except Exception as error:
            self._fault = error
        self._tracker = self._open = None


class RunPart:
    """The Tracker of one model among several that log to the same run, whose page is that of all."""

    def __init__(self, run: ActiveRun, name: str) -> None:
        self._run = run
        self.name = name

    def look(self) -> None:
        """Find the run to log to; never raises."""
        self._run.look()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values under the part's names."""
        self._run.scalars(step, {self._run.name_in_run(self, name): value for name, value in values.items()})

    def artifact(self, path: Path) -> None:
        """Do nothing: the page of all parts has this one."""
