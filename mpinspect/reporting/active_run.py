"""The tracker's run that a script has open at the moment, wherever the script itself would log."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpinspect.reporting.trackers import GROUP, PACKAGES, MlflowRun, TrackioRun, WandbRun, check_name


class ActiveRun:
    """A Tracker that logs to the open run; without one, scalars are dropped.

    Args:
        name: of the tracker's package, as in PACKAGES. Only the script imports it.
        before_end: called just before a run of W&B ends, which accepts no rows afterwards. The others do.

    Raises:
        ValueError, ImportError: as ``check_name``.
    """

    def __init__(self, name: str, before_end: Callable[[], None]) -> None:
        self._name = check_name(name)
        self._before_end = before_end
        #: The package's own run, and the Tracker that logs to it; both None while no run is open.
        self._open: Any = None
        self._tracker: WandbRun | MlflowRun | TrackioRun | None = None
        #: The parts that have logged to the open run, in this order.
        self._parts: list[RunPart] = []
        #: Runs whose waiting rows are still to be logged.
        self._left: list[WandbRun | MlflowRun | TrackioRun] = []
        #: Held while something is logged, since several models may log. The thread that trains takes it only at the end.
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._fault: Exception | None = None
        self._found = False
        #: The first step with dropped scalars since a run ended; None without one.
        self._dropped_from: int | None = None

    @property
    def missing(self) -> str:
        """A sentence on scalars that were dropped because no run was open; "" if none were, and on every rank but the first."""
        package = PACKAGES[self._name]
        if os.environ.get("RANK", "0") != "0":
            return ""
        if not self._found:
            return f"nothing was logged to {package.title}: the training opened no run of it ({package.begin})"
        if self._dropped_from is not None:
            return f"the run of {package.title} ended before the training: it has no scalars from step {self._dropped_from:,} on"
        return ""

    @property
    def is_open(self) -> bool:
        """Whether a run is open that accepts rows."""
        return self._tracker is not None

    def find_run(self) -> None:
        """Find the run to log to, as the calling thread sees it; never raises."""
        package = sys.modules.get(self._name)
        if package is None or os.getpid() != self._process:
            return
        try:
            run = PACKAGES[self._name].open(package)
            if run is not None and run is not self._open:
                self._bind(run)
        except Exception as error:
            self._fault = error

    def part(self, name: str) -> RunPart:
        """Return a Tracker for one of several models; in each run, all but the first to log prefix their names to values."""
        return RunPart(self, name)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values. Raises whatever the package raises, or raised when the run was found."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        with self._lock:
            while self._left:
                self._left.pop().release()
            if self._tracker is not None:
                self._tracker.scalars(step, values)
            elif self._open is None and self._dropped_from is None:
                self._dropped_from = step

    def artifact(self, path: Path) -> None:
        """Keep a page. Raises whatever the package raises."""
        with self._lock:
            if self._tracker is not None:
                self._tracker.artifact(path)

    def leave(self) -> None:
        """Stop calling ``before_end``. Only rows that wait for the end of a run are logged after this."""
        self._before_end = lambda: None

    def end(self) -> None:
        """Log the rows that wait for the end of a run, since the process ends; never raises an Exception."""
        self.leave()
        self._ends()

    def join(self, part: RunPart) -> None:
        """Give a part its place among those that log to the open run."""
        if part not in self._parts and self._open is not None:
            self._parts.append(part)

    def name_in_run(self, part: RunPart, name: str) -> str:
        """Return the name that a value of a part has in the open run."""
        self.join(part)
        if self._parts and part is not self._parts[0]:
            name = name.replace(f"{GROUP}/", f"{GROUP}/{part.name}/", 1)
        return name

    def _bind(self, run: Any) -> None:
        if self._tracker is not None:
            self._left.append(self._tracker)
        is_disabled = getattr(run, "disabled", False)
        self._tracker = None if is_disabled else PACKAGES[self._name].log_to(run)
        self._open, self._parts, self._found, self._dropped_from = run, [], True, None
        if isinstance(self._tracker, WandbRun):
            # Exit handlers run last in, first out: before W&B's own, which was registered when the run began.
            atexit.unregister(self._ends)
            atexit.register(self._ends)
            self._tracker.before_end(self._ends)

    def _ends(self) -> None:
        """Log the remaining rows to a run that is about to end; never raises an Exception."""
        tracker = self._tracker
        if tracker is None or os.getpid() != self._process:
            return
        atexit.unregister(self._ends)
        try:
            self._before_end()
            with self._lock:
                tracker.release()
        except Exception as error:
            self._fault = error
        self._tracker = self._open = None


class RunPart:
    """The Tracker of one model among several that log to one run, which has one page for all."""

    def __init__(self, run: ActiveRun, name: str) -> None:
        self._run = run
        self.name = name

    def find_run(self) -> None:
        """Find the run to log to, and take this model's place in it; never raises."""
        self._run.find_run()
        self._run.join(self)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values under the part's names."""
        self._run.scalars(step, {self._run.name_in_run(self, name): value for name, value in values.items()})

    def artifact(self, path: Path) -> None:
        """Has no effect: the page of all parts contains this one."""
