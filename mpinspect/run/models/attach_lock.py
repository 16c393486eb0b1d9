"""One thread at a time: scripts that train several models on several threads are watched by one set of records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: A thread waits no longer for another. Nothing of ours takes so long; a lock of the script's own might be in the way.
_PATIENCE_S = 20.0


class Turns:
    """The lock around finding, naming and attaching. A thread that has it may take it again.

    A forked child must not ask for it: another thread of the parent may have had it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for one's turn.

        Raises:
            TimeoutError: it did not come.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TimeoutError("another thread was being looked at")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def mine_if_free(self) -> Iterator[bool]:
        """Whether it is one's turn at once: for callbacks that come at any moment, and must never wait."""
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()
