"""What is still to be done when the process ends, however it ends but by a signal that kills it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.util import Finalize

from mpinspect.ranges.capture.recording import warn


class AtExit:
    """Calls ``end`` when this process ends, once. A forked child ends nothing of its parent's.

    Args:
        end: must bear being called in the middle of whatever the process did last. An Exception in it becomes a warning.
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
        """Do nothing then."""
        atexit.unregister(self)
        if self._of_child is not None:
            self._of_child.cancel()
