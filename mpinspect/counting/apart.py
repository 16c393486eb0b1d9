"""Running a compiler where it holds nothing of the caller's, and saying so where it takes its time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

Result = TypeVar("Result")

#: After so long somebody may wonder what goes on.
_SAID_AFTER_S = 2.0
_LINE = (
    "mpinspect: compiling what counts, for this machine; where it can be kept on disk, the next start finds it there"
)
#: Held from when it was said on.
_said = threading.Lock()


def apart(work: Callable[[], Result]) -> Result:
    """The result of ``work``, run in a thread of its own. Raises what it raised.

    Compilers raise and catch exceptions by the dozen, and leave some in reference cycles with the frames that they came
    through. Frames hold their callers, and those what they have in hand: a model and its optimizer would outlive their last
    name until the garbage collector comes by.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="mpinspect-compile") as executor:
            done = executor.submit(work)
            try:
                return done.result(_SAID_AFTER_S)
            except NotYet:
                if not done.done():
                    _say_once()
                return done.result()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        # No new threads any more.
        return work()


def _say_once() -> None:
    # Several threads may compile at once. Nobody may be listening, or there may be nothing to write to.
    if _said.acquire(blocking=False):
        with contextlib.suppress(Exception):
            print(_LINE, file=sys.stderr, flush=True)
