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

COMPILING = "mpinspect: compiling the counting kernels (first run on this machine; cached on disk)"

#: After so long somebody may wonder what goes on.
_SAID_AFTER_S = 2.0
_said: set[str] = set()
_saying = threading.Lock()


def apart(work: Callable[[], Result], slow: str = "") -> Result:
    """Return the result of ``work``, run in a thread of its own. Raises what it raised.

    Compilers raise and catch exceptions by the dozen, and leave some in reference cycles with the frames that they came
    through. Frames hold their callers, and those what they have in hand: a model and its optimizer would outlive their last
    name until the garbage collector comes by.

    Args:
        slow: a line for stderr, if it takes more than two seconds.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="mpinspect-compile") as executor:
            done = executor.submit(work)
            try:
                return done.result(_SAID_AFTER_S)
            except NotYet:
                if slow and not done.done():
                    say(slow)
                return done.result()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        # No new threads any more.
        return work()


def say(line: str) -> None:
    """Print a line on stderr, once in a process."""
    with _saying:
        if line in _said:
            return
        _said.add(line)
    # Nobody may be listening, or there may be nothing to write to.
    with contextlib.suppress(Exception):
        print(line, file=sys.stderr, flush=True)
