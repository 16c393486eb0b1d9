"""Calls a function on threads that start together and switch often."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work`` with each thread's number; return the results, or raise the first thread's error."""
    barrier, results, errors = threading.Barrier(count), [None] * count, [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            errors[number] = error

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for error in filter(None, errors):
        raise error
    return results
