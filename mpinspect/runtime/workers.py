"""Threads that share work: torch's own for compiled code (``TEAM``), a few of ours for torch operations (``POOL``).

On our threads torch does not spread an operation over further threads.
Counting and emulated products work on cache-sized chunks. Splitting every operation on a chunk with OpenMP costs more than
it saves, and stalls for milliseconds at a time if another process occupies a core. Giving each thread its own
chunks avoids both.
``torch.set_num_threads`` would change the user's program, so ``single_threaded`` sets OpenMP's thread count instead,
which is a per-thread setting, and restores it in the calling thread. If torch ignores this count (another threading library),
``single_threaded`` yields False and the caller uses chunks that torch does not split.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from mpinspect.runtime.finalizing import until_finalized

Item = TypeVar("Item")
Result = TypeVar("Result")

# More threads gain little, since they take the interpreter lock between operations.
_MOST_THREADS = 8


@contextmanager
def single_threaded() -> Iterator[bool]:
    """Make torch operations of this thread inside the block run on this thread alone; yield whether this works."""
    before = torch.get_num_threads()
    if before == 1:
        yield True
        return
    set_threads = _openmp_setter()
    if set_threads is None:
        yield False
        return
    set_threads(1)
    try:
        yield torch.get_num_threads() == 1
    finally:
        set_threads(before)


class WorkerPool:
    """Threads that help the calling thread, started on first use, and again in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[Iterable[Item]], Result], items: Sequence[Item], threads: int) -> list[Result]:
        """Run ``work`` in several threads, including the caller's, on items from a shared queue; return its results.

        A thread whose core is busy with something else takes fewer items. Blocks until all are done; call it inside
        ``single_threaded``. Raises any exception of ``work``.
        """
        queue = _Queue(items)
        others = max(1, min(threads, _MOST_THREADS, len(items))) - 1
        tasks = [task for task in (self._submit(work, queue) for _ in range(others)) if task is not None]
        mine = work(queue)
        # Cancel tasks that have not begun by now: no items are left for them.
        return [mine, *(task.result() for task in tasks if not task.cancel())]

    def _submit(self, work: Callable[[Iterable[Item]], Result], queue: _Queue[Item]) -> Future[Result] | None:
        try:
            return self._started().submit(_alone, work, queue)
        except RuntimeError:
            # The interpreter is shutting down and starts no new threads: the caller processes all items.
            return None

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="mpinspect-count")
            return self._executor

    def forget(self) -> None:
        """Drop the threads, which a fork does not copy, and the lock, which may have been held at the fork."""
        self._lock = threading.Lock()
        self._executor = None


class _Queue(Generic[Item]):
    """An iterator that several threads can share."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> _Queue[Item]:
        return self

    def __next__(self) -> Item:
        with self._lock:
            return next(self._items)


def _alone(work: Callable[[Iterable[Item]], Result], queue: _Queue[Item]) -> Result:
    with single_threaded():
        return work(queue)


class Team:
    """torch's OpenMP threads, for compiled work.

    Between two operations of a training step these threads spin on their cores, so any other thread would have to
    share a core with one of them. Code compiled by GCC starts a parallel region with ``GOMP_parallel``, which the
    OpenMP libraries of LLVM and Intel provide too.
    """

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """The addresses of ``GOMP_parallel`` and ``omp_get_thread_num`` for compiled code; NO_TEAM if not found."""
        return _team()

    @property
    def there(self) -> bool:
        """Whether torch's OpenMP threads can be used."""
        return self.addresses != NO_TEAM

    def forget(self) -> None:
        """Disable the team in a forked child, which lacks the threads; GCC's library would wait for them forever."""
        self.addresses = NO_TEAM


#: ``Team.addresses`` if torch's OpenMP threads can't be used.
NO_TEAM = (0, 0)


@cache
def _team() -> tuple[int, int]:
    functions = [_openmp(name) for name in ("GOMP_parallel", "omp_get_thread_num")]
    if None in functions:
        return NO_TEAM
    parallel, thread_number = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)  # type: ignore[arg-type]
    return parallel, thread_number


def _openmp_setter() -> Callable[[int], None] | None:
    """Return ``omp_set_num_threads``, which affects only the calling thread; None if it is not found."""
    return _openmp("omp_set_num_threads")


@cache
def _openmp(name: str) -> Callable[..., None] | None:
    """Return a function of the OpenMP library that torch uses; None if it is not found."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function: Any = getattr(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError):
            continue
        function.restype = None
        return function  # type: ignore[no-any-return]
    return None


def threads_for(length: int, least: int) -> int:
    """Return how many threads process so many elements: torch's from ``least`` on, else one."""
    return torch.get_num_threads() if length >= least else 1


POOL = WorkerPool()
TEAM = Team()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=until_finalized(POOL.forget))
    os.register_at_fork(after_in_child=until_finalized(TEAM.forget))
