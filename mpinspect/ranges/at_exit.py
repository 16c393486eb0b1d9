"""The end of a process, or of a training that broke: what is still to be done then, and the report on stderr."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from mpinspect.ranges.analysis.first_line import first_line, what_broke
from mpinspect.ranges.capture.recording import warn
from mpinspect.reporting.streams import printable, write

if TYPE_CHECKING:
    from mpinspect.ranges.analysis.report import RangeReport


class AtExit:
    """Calls ``end`` once when this process ends, unless a signal kills it. A forked child ends nothing of its parent's.

    Args:
        end: may be called in the middle of whatever the process did last. An Exception in it becomes a warning.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._process = os.getpid()
        self._of_child: Finalize | None = None
        atexit.register(self)
        if multiprocessing.parent_process() is not None:
            # A forked one ends without the functions of atexit.
            self._of_child = Finalize(None, self, exitpriority=0)

    def __call__(self) -> None:
        if self._process != os.getpid():
            return
        self.call_off()
        try:
            self._end()
        except Exception as error:
            warn(f"the inspector did not end as it should: {error!r}; what it wrote until then is in its log_dir")

    def call_off(self) -> None:
        """Do nothing when the process ends."""
        atexit.unregister(self)
        if self._of_child is not None:
            self._of_child.cancel()


def print_report(make: Callable[[], RangeReport]) -> None:
    """Print the report that ``make`` gives, led by what broke. Whatever fails here must not hide the user's exception."""
    try:
        report = make()
        broke = what_broke(report)
        write(sys.stderr, f"{printable(first_line(broke))}\n{report}\n" if broke is not None else f"{report}\n")
    except Exception as error:
        write(sys.stderr, f"mpinspect could not print its report: {error!r}\n")
