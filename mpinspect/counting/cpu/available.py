"""Loads the compiled loops from numba's cache at first use; a training process never compiles them.

``compiler`` starts another process that compiles missing loops. Until it has finished, and if numba is missing or fails, torch
counts. Numba's exceptions are caught here. Importing this module does not import numba.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpinspect.counting.apart import COMPILING, apart, say
from mpinspect.counting.cpu import compiler

_STARTED = (
    "mpinspect: compiling the counting kernels in the background (first run on this machine; cached on disk); "
    "until then torch counts"
)
_SLOWER = "counting on the CPU takes several times longer"
#: Seconds between two checks whether the process has finished; a check takes microseconds.
_LOOK_EVERY_S = 1.0


class Loops(NamedTuple):
    """The modules ``counter``, ``largest`` and ``lost``, with all their loops loaded."""

    counter: Any
    largest: Any
    lost: Any


class Available:
    """The state of compiled loops in this process.

    Args:
        imported: imports their modules, and compiles loops that numba's cache lacks; by default those of ``Loops``.
    """

    def __init__(self, imported: Callable[[], Any] | None = None) -> None:
        self._imported = imported or (lambda: _imported())
        #: A sentence on why the loops are not used although numba is installed; "" if no problem is known.
        self.trouble = ""
        self._loops: Any = None
        #: When to check next, by the monotonic clock.
        self._next_look_s = -math.inf
        #: The cache that a process was started to fill.
        self._filled: Path | None = None
        self._looking = threading.Lock()

    def loops(self) -> Any:
        """Return the modules; None while torch must count. The first call and the one that loads them may take a second."""
        if (
            self._loops is None
            and time.monotonic() >= self._next_look_s
            # Other threads do not wait for the one that checks.
            and self._looking.acquire(blocking=False)
        ):
            try:
                apart(self._look)
            finally:
                self._looking.release()
        return self._loops

    def compile_here(self) -> Any:
        """Compile missing loops in this process: for tests and benchmarks, which measure the compiled loops."""
        with self._looking:
            if self._loops is None:
                apart(lambda: self._try(self._from_disk))
            if self._loops is None:
                apart(lambda: self._try(self._compile_alone), COMPILING)
        return self._loops

    def _look(self) -> None:
        if self._filled is not None and compiler.at_work(self._filled):
            self._next_look_s = time.monotonic() + _LOOK_EVERY_S
        else:
            self._try(self._read)

    def _read(self) -> Any:
        """Return the loops from numba's cache; if some are missing, start a process that compiles them and return None."""
        found = self._from_disk()
        if found is not None:
            return found
        if self._filled is not None:
            raise _NoLoopsError("the process that was to compile the counting kernels ended early")
        folder = _cache_folder()
        try:
            compiler.start(folder)
        except (compiler.CanNotStartError, OSError, subprocess.SubprocessError) as error:
            raise _NoLoopsError(f"no process could be started to compile the counting kernels ({error})") from None
        self._filled, self._next_look_s = folder, time.monotonic() + _LOOK_EVERY_S
        say(_STARTED)
        return None

    def _try(self, get: Any) -> None:
        self._next_look_s, self._loops, self.trouble = math.inf, None, ""
        try:
            self._loops = get()
        except _NoLoopsError as error:
            self.trouble = f"{error}: {_SLOWER}"
        except Exception as error:
            # Compilers may raise anything.
            if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
                why = " ".join(str(error).split())[:200]
                self.trouble = f"numba is installed and does not work here ({why}): {_SLOWER}"

    def _from_disk(self) -> Any:
        """Return the modules; None if numba's cache lacks one of their loops."""
        from mpinspect.counting.cpu import compiling

        _cache_folder()
        try:
            with compiling.only_from_disk():
                return self._imported()
        except compiling.NotOnDiskError:
            return None

    def _compile_alone(self) -> Any:
        """Compile all loops, once no other process is compiling."""
        with compiler.exclusively(_cache_folder()):
            compile_all()
            return self._imported()


class _NoLoopsError(Exception):
    """No compiled loops are available although numba works; the message is a sentence."""


def compile_all() -> None:
    """Compile all loops that numba's cache lacks, and store them there. Takes a minute of one processor."""
    from mpinspect.counting.cpu import compiling

    folder = _cache_folder()
    _imported()
    # Last, since every training waits for the others.
    _imported_blocks()
    compiling.remove_others(folder)


def _cache_folder() -> Path:
    from mpinspect.counting.cpu import compiling

    try:
        return compiling.cache_folder()
    except RuntimeError:
        raise _NoLoopsError(
            "numba can't store compiled loops: mpinspect's own folder and your cache folder are read-only (the environment "
            "variable NUMBA_CACHE_DIR sets another)"
        ) from None


def _imported() -> Loops:
    from mpinspect.counting.cpu import counter, largest, lost

    return Loops(counter, largest, lost)


def _imported_blocks() -> Any:
    from mpinspect.counting.cpu import blocks

    return blocks


AVAILABLE = Available()
loops: Callable[[], Loops | None] = AVAILABLE.loops
#: The module that counts blocks.
BLOCKS = Available(_imported_blocks)
