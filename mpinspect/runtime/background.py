"""Work beside the training: a thread of our own that lives while there is some, and gives way to the user's threads.

Python's threads share one lock. A thread that computes in Python keeps it for up to 5 ms at a time
(``sys.getswitchinterval``), and a training step that calls a hundred small operations would wait as often. So the work calls
``give_way`` between its parts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

#: Seconds of work between two rests: what a step may have to wait for at once ...
_WORK_S = 0.001
#: ... and how many times as long the rest is: a tenth of Python's time is asked for while nobody waits for the work.
_REST = 9.0
_LONGEST_REST_S = 0.05
_LOOK_AGAIN_S = 0.05

_of_this_thread = threading.local()


def give_way() -> None:
    """Let others work, if this is a background thread and was at work for a millisecond. Elsewhere nothing."""
    rest: Callable[[], None] | None = getattr(_of_this_thread, "rest", None)
    if rest is not None:
        rest()


class Background:
    """Calls functions in the order in which they came, on one thread beside the caller's.

    The thread ends when nothing is left, so an idle Background holds nothing and no interpreter waits for it; one at work is
    waited for at the interpreter's exit. Where no thread can be started (the interpreter is shutting down) the caller's does the
    work. A forked child inherits nothing: its calls do nothing, and nothing there waits.

    Any thread may call any method, from a signal handler or a finalizer too.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may come while this thread holds it.
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._process = os.getpid()
        #: Somebody waits: no more rests until all is done.
        self._urgent = False
        self._at_work_since = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is still to be done."""
        return self._worker is not None

    def call(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Have ``work`` called soon; it must not raise. ``urgent``: it, and what comes before it, without rests."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._waiting.append(work)
            self._urgent |= urgent
            if self._worker is not None or self._started():
                return
            self._worker = threading.current_thread()
        self._work()

    def wait(self, most_s: float = math.inf) -> None:
        """Return when all that was asked for is done, or time is up. On the background thread, and in a forked child, at once."""
        if os.getpid() != self._process:
            return
        self._urgent = True
        end = time.monotonic() + most_s
        while (left := end - time.monotonic()) > 0 and (worker := self._worker) not in (
            None,
            threading.current_thread(),
        ):
            # Not for longer: it may be the main thread at its end, doing the work itself.
            worker.join(min(_LOOK_AGAIN_S, left))

    def _started(self) -> bool:
        # Once the interpreter waits for threads no more, a new one would be frozen in the middle of a write.
        if not threading.main_thread().is_alive():
            return False
        try:
            self._worker = threading.Thread(target=self._work, name="mpinspect-write", daemon=False)
            self._worker.start()
        except RuntimeError:
            return False
        except BaseException:
            # Ctrl-C: it may run or not. If it does it finds that it is not the one, and ends.
            self._worker = None
            raise
        return True

    def _work(self) -> None:
        outer = getattr(_of_this_thread, "rest", None)
        _of_this_thread.rest = self._rest
        self._at_work_since = time.thread_time()
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException:
            # Ctrl-C in the caller's thread. What is left is done at the next call.
            self._worker = None
            raise
        finally:
            _of_this_thread.rest = outer

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._worker is not threading.current_thread():
                return None
            if self._waiting:
                return self._waiting.popleft()
            self._worker = None
            self._urgent = False
            return None

    def _rest(self) -> None:
        worked = time.thread_time() - self._at_work_since
        if worked < _WORK_S:
            return
        if not self._urgent and threading.main_thread().is_alive():
            time.sleep(min(_REST * worked, _LONGEST_REST_S))
        self._at_work_since = time.thread_time()
