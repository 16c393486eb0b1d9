"""Does work on a background thread that lives only while there is work, and that yields to the user's threads.

Python's threads share the GIL. A thread that computes in Python holds the GIL for up to 5 ms at a time
(``sys.getswitchinterval``), and a training step with a hundred small operations would wait for it a hundred times. The
work therefore calls ``give_way`` between its parts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds of work between two rests, and so the longest that a step waits at a time.
_WORK_S = 0.001
#: A rest lasts this many times as long as the work before it: unless urgent, the work takes a tenth of Python's time.
_REST = 9.0
_LONGEST_REST_S = 0.05
_LOOK_AGAIN_S = 0.05

#: Seconds before the first time. Each later pause is the longest of: _INTERVAL_S; _COST_FACTOR times the processor time that
#: the work last took (so it takes 0.5% at most); _GROWTH times the time since the start (so a long run has about a hundred).
_FIRST_S, _INTERVAL_S, _COST_FACTOR, _GROWTH = 10.0, 60.0, 200, 0.1

_of_this_thread = threading.local()


def give_way() -> None:
    """Sleep for a while if this is a background thread that has worked for a millisecond; otherwise do nothing."""
    rest: Callable[[], None] | None = getattr(_of_this_thread, "rest", None)
    if rest is not None:
        rest()


class Seldom:
    """Schedules costly work that a long run repeats, so that it takes half a percent of the processor at most.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        #: When the work is due; infinity while it is done.
        self.due_at = self._begun + _FIRST_S

    @property
    def is_due(self) -> bool:
        """Whether it is time to do the work."""
        return self._clock() >= self.due_at

    def begin(self) -> None:
        """Make the work not due before ``doing`` has ended. Call it when the work is handed to another thread."""
        self.due_at = math.inf

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Measure the work that the block does on this thread, and set when it is due again."""
        begun = time.thread_time()
        try:
            yield
        finally:
            cost, now = time.thread_time() - begun, self._clock()
            self.due_at = now + max(_INTERVAL_S, _COST_FACTOR * cost, _GROWTH * (now - self._begun))


class Background:
    """Calls functions in the order of submission, on one background thread.

    The thread ends when no work is left. At exit the interpreter waits for it only while it works. If no thread can be
    started (the interpreter is shutting down), the calling thread does the work. In a forked child every method is a
    no-op.

    Any thread may call any method, also from a signal handler or a finalizer.
    """

    def __init__(self) -> None:
        # Reentrant, because a signal handler may run while this thread holds the lock.
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._process = os.getpid()
        #: Whether to take no more rests until all work is done.
        self._urgent = False
        self._at_work_since = 0.0

    @property
    def busy(self) -> bool:
        """Whether any work is left."""
        return self._worker is not None

    def call(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Submit ``work``, which must not raise; ``urgent``: do it, and all work submitted before it, without rests."""
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
        """Wait until all work is done or time is up; return at once on the background thread and in a forked child."""
        if os.getpid() != self._process:
            return
        self._urgent = True
        end = time.monotonic() + most_s
        while (left := end - time.monotonic()) > 0 and (worker := self._worker) not in (
            None,
            threading.current_thread(),
        ):
            # Wait with a timeout: the worker may be the main thread, which does the work itself at its end.
            worker.join(min(_LOOK_AGAIN_S, left))

    def _started(self) -> bool:
        # After the main thread has ended, a new thread could be frozen in the middle of a write.
        if not threading.main_thread().is_alive():
            return False
        try:
            self._worker = threading.Thread(target=self._work, name="mpinspect-write", daemon=False)
            self._worker.start()
        except RuntimeError:
            return False
        except BaseException:
            # Ctrl-C: the thread may have started; if so, it finds that it is not the worker and ends.
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
            # Ctrl-C in the caller's thread: the remaining work is done at the next call.
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
