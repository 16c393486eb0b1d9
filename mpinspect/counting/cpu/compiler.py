"""Starts the process that compiles the loops into numba's cache, so that no training waits for the compiler.

The process is a fresh interpreter, not a fork of the caller's threads. It has its own session, the lowest priority unless it
would starve, and none of the caller's streams. It is not a child of the caller: a child's exit would send the caller SIGCHLD, and
``os.wait`` would find it. The caller therefore detects a running process by a lock on the cache's folder. The caller takes
this lock and the process inherits it, so that the system releases it however the process ends, and several ranks start
only one process.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mpinspect.runtime.appending import lock_of

#: Seconds of processor time after which the process is killed; compiling takes about one minute.
_MOST_CPU_S = 600

#: The first priority; the second, used if the process gets less than this share of one processor in so many seconds.
_NICE, _NICE_IF_STARVED, _PATIENCE_S, _LEAST_SHARE = 19, 5, 30.0, 0.25
#: Exit status of a child that got too little processor time.
_STARVED = 75

#: The program of the process: it exits at once, and its child does the work.
_CODE = """
import os, sys
if hasattr(os, "fork"):
    if os.fork():
        os._exit(0)
sys.path[:] = {path!r}
from mpinspect.counting.cpu.compiler import give_way
give_way()
{work}
"""
_WORK = "from mpinspect.counting.cpu import available; available.compile_all()"


class CanNotStartError(Exception):
    """No interpreter can be started; the message is a sentence."""


def start(folder: Path) -> None:
    """Start the process, unless one is running.

    Args:
        folder: numba's cache folder, which must exist.

    Raises:
        CanNotStartError: this process is not a plain Python interpreter.
        OSError, subprocess.SubprocessError: the system could not start the process.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise CanNotStartError("this process is not a plain Python interpreter, so a second one can't be started")
    try:
        lock = lock_of(folder)
    except BlockingIOError:
        return
    code = _CODE.format(path=[str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)], work=_WORK)
    try:
        # -W: the user's settings may turn warnings into errors.
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            env=_environment(),
            pass_fds=() if lock is None else (lock,),
        )
    finally:
        if lock is not None:
            os.close(lock)
    if hasattr(os, "fork") and process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def at_work(folder: Path) -> bool:
    """Return whether a process is compiling into this folder; True if the system has no locks."""
    try:
        lock = lock_of(folder)
    except BlockingIOError:
        return True
    if lock is None:
        return True
    os.close(lock)
    return False


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process compiles into it; waits until the lock is free."""
    lock = lock_of(folder, wait_s=math.inf)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def give_way() -> None:
    """Continue in a child process that yields processors and memory to all others and has a limited running time.

    Its first priority is the lowest. If the machine is so busy that the child gets hardly any time, a second child with a
    higher priority continues from numba's cache, which holds the first one's results. The caller, as parent, only waits.
    """
    # The system kills this process first when memory runs out.
    _tell_kernel("oom_score_adj", 1000)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    if not hasattr(os, "fork"):
        return
    for nice in (_NICE, _NICE_IF_STARVED):
        child = os.fork()
        if not child:
            _be_nice(nice)
            if nice == _NICE:
                threading.Thread(target=_end_if_starved, daemon=True).start()
            return
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != _STARVED:
            break
    os._exit(0)


def _be_nice(nice: int) -> None:
    # Linux may divide processors among sessions first; priorities then apply only within a session.
    _tell_kernel("autogroup", nice)
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def _end_if_starved() -> None:
    time.sleep(_PATIENCE_S)
    if time.process_time() < _LEAST_SHARE * _PATIENCE_S:
        os._exit(_STARVED)


def _tell_kernel(setting: str, value: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/self/{setting}").write_text(str(value), encoding="ascii")


def _environment() -> dict[str, str]:
    """Return the caller's environment, with numba's folder as an absolute path."""
    import numba

    folder: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    return {**os.environ, "NUMBA_CACHE_DIR": str(Path(folder).absolute()) if folder else ""}
