"""Cleanup at the end of a process, and the report printed to stderr after an exception."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.capture.recording import warn
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.reporting.streams import printable, write
from mpinspect.reporting.words import filled

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport


class AtExit:
    """Calls ``end`` once when this process ends, unless a signal kills it; has no effect in children forked later.

    Args:
        end: the function to call. An Exception that it raises becomes a warning.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._process = os.getpid()
        self._of_child: Finalize | None = None
        atexit.register(self)
        if multiprocessing.parent_process() is not None:
            # A child process started by fork ends without running atexit functions.
            self._of_child = Finalize(None, self, exitpriority=0)

    def __call__(self) -> None:
        if self._process != os.getpid():
            return
        self.call_off()
        try:
            self._end()
        except Exception as error:
            warn(f"the inspector failed to close: {error!r}; its log_dir has the records written until then")

    def call_off(self) -> None:
        """Unregister ``end``, so that it is not called when the process ends."""
        atexit.unregister(self)
        if self._of_child is not None:
            self._of_child.cancel()


def print_report(make: Callable[[], RangeReport]) -> None:
    """Print the report that ``make`` returns to stderr, after a line on the event that broke the run; raises no Exception."""
    try:
        report = make()
        broke = what_broke(report)
        opening = filled("{}\n", broke and printable(first_line(broke)))
        write(sys.stderr, f"{opening}{report}\n")
    except Exception as error:
        write(sys.stderr, f"mpinspect could not print its report: {error!r}\n")
