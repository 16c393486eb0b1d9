"""Handles a SIGTERM in a launched process: writes the interrupted stack to a file, or waits for the report."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpinspect.runtime.finalizing import until_finalized


def leave_trace_of_sigterm(file: Path) -> None:
    """Let a SIGTERM that ends this process write the stack to ``file``, even while the process waits in native code.

    The file distinguishes ranks that the launcher stopped from the rank that died. Does nothing if the script handles or
    ignores the signal.
    """
    import faulthandler

    def is_deadly() -> bool:
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    @until_finalized
    def in_child() -> None:
        if is_deadly():
            faulthandler.unregister(signal.SIGTERM)

    if hasattr(faulthandler, "register") and is_deadly():
        # The stack is for the report only: on a full disk the training is inspected without it.
        with suppress(OSError):
            file.unlink(missing_ok=True)
            faulthandler.register(signal.SIGTERM, file.open("xb"), all_threads=False, chain=True)
            os.register_at_fork(after_in_child=in_child)


class Sigterm:
    """Lets a SIGTERM that would end the process wait for the report: a launcher sends it to all ranks once one has failed.

    Does nothing outside the main thread, or if the script handles the signal.

    Args:
        report: makes the report, and calls ``let_through`` at its end; returns at once if the report has begun.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._is_put_off = self._came = False

    def put_off(self) -> None:
        """From now on make the report before a SIGTERM ends the process."""
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._arrived)
                self._is_put_off = True

    def let_through(self) -> None:
        """Let SIGTERM end the process again, at once if one has arrived."""
        if self._is_put_off:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._came:
            os.kill(os.getpid(), signal.SIGTERM)

    @until_finalized
    def _arrived(self, number: int, frame: object) -> None:
        self._came = True
        self._report()
