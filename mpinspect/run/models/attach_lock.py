"""Ensures that only one thread at a time attaches or detaches, and never while mpinspect or torch is at work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from mpinspect.runtime import own_code

#: Seconds that a thread waits for the lock: our work takes less, unless it is blocked by one of the script's locks.
_PATIENCE_S = 20.0


class AttachLock:
    """The reentrant lock held while finding, naming, attaching to and detaching from models.

    A forked child must not take it: another thread of the parent may have held it at the fork.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises TimeoutError if another thread has held it for 20 s."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TimeoutError(f"another thread has been attaching for {_PATIENCE_S:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Try to take the lock without waiting, and yield whether it is held; meant for weakref callbacks."""
        taken = self._lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()


def is_unsafe_to_detach(frame: FrameType | None) -> bool:
    """Return whether any thread is inside our own code, or torch is tracing, compiling or capturing a graph.

    Weakref callbacks need this check: they run wherever the garbage collector does, inside any code. ``frame`` is the
    innermost frame of this thread's stack to check.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    own = threading.get_ident()
    stacks = [frame, *(each for thread, each in sys._current_frames().items() if thread != own)]
    return any(_is_ours(each) for each in stacks)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether the stack is in our uninterruptible code; the thread that writes files does not count."""
    ours = False
    while frame is not None:
        if own_code.is_of(frame, own_code.WRITING_FILES):
            return False
        ours = ours or own_code.is_of(frame, own_code.NOT_TO_BE_INTERRUPTED)
        frame = frame.f_back
    return ours
