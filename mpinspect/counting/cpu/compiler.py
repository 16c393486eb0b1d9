"""The process that compiles the loops, so that no training waits for it: numba's cache is what it leaves behind.

It is a fresh interpreter, no fork of the caller's threads, in a session of its own and with the lowest priority, unless it
would starve. It holds neither the caller's streams nor its working directory. It is no child either: a child's end would reach
the caller as a signal, and ``os.wait`` would find it. Whether it is still at work is therefore asked of a lock on the cache's
folder, which the caller takes and the process inherits: the lock is gone when the process is, however that ended, and several
ranks start one process.
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

#: Seconds of a processor after which the process ends itself; compiling takes about one minute.
_MOST_CPU_S = 600

#: The priority at first, and after so many seconds in which the process got less than this share of one processor.
_NICE, _NICE_IF_STARVED, _PATIENCE_S, _LEAST_SHARE = 19, 5, 30.0, 0.25
#: The exit status of a child that got too little time.
_STARVED = 75

#: What it runs: the process that was started ends at once, its child has the work done.
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
    """There is no interpreter to start."""


def start(folder: Path) -> None:
    """Start the process, unless one is at work already.

    Args:
        folder: of numba's cache; it exists.

    Raises:
        CanNotStartError: this is no plain Python interpreter.
        OSError, subprocess.SubprocessError: the system does not start it.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise CanNotStartError("this process is no plain Python interpreter, of which a second could be started")
    try:
        lock = lock_of(folder)
    except BlockingIOError:
        return
    code = _CODE.format(path=[str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)], work=_WORK)
    try:
        # -W: what the user makes an error is none in there.
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
    """Whether a process compiles into this folder now; True as well where locks can't tell."""
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
    """Inside, this process is the one that compiles into the folder; waits for another one."""
    lock = lock_of(folder, wait_s=math.inf)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def give_way() -> None:
    """Continue in a child process that competes with nobody for processors or memory, and comes to an end.

    It first has the lowest priority. Where the machine is so busy that the child gets hardly any time, another child takes over
    with a higher priority: numba's cache keeps what the first one compiled. The caller becomes the parent, which only waits.
    """
    # Where memory is short this process is the first to be ended.
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
    # Linux may share processors among sessions first, so that a process's priority holds within its session only.
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
    """The caller's, with numba's folder as a path that does not depend on the working directory."""
    import numba

    folder: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    return {**os.environ, "NUMBA_CACHE_DIR": str(Path(folder).absolute()) if folder else ""}
