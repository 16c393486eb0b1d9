"""Runs a compiler in its own thread, so that it does not extend the lifetime of callers' objects; announces long runs."""

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

#: Seconds after which a line on stderr announces the compilation.
_SAID_AFTER_S = 2.0
_said: set[str] = set()
_saying = threading.Lock()


def apart(work: Callable[[], Result], slow: str = "") -> Result:
    """Run ``work`` in a separate thread, and return its result or raise its exception.

    Compilers raise and catch many exceptions, and leave some in reference cycles with stack frames. Frames hold their callers'
    frames and local variables, so in the caller's thread a model and its optimizer would stay in memory until the garbage
    collector runs. ``slow`` is printed on stderr if ``work`` takes more than two seconds.
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
        # At interpreter shutdown no new thread can start.
        return work()


def say(line: str) -> None:
    """Print a line on stderr, at most once per process."""
    with _saying:
        if line in _said:
            return
        _said.add(line)
    # stderr may be closed or missing.
    with contextlib.suppress(Exception):
        print(line, file=sys.stderr, flush=True)
