"""Running a compiler where it holds nothing of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(work: Callable[[], Result]) -> Result:
    """The result of ``work``, run in a thread of its own. Raises what it raised.

    Compilers raise and catch exceptions by the dozen, and leave some in reference cycles with the frames that they came
    through. Frames hold their callers, and those what they have in hand: a model and its optimizer would outlive their last
    name until the garbage collector comes by.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="mpinspect-compile") as executor:
            return executor.submit(work).result()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        # No new threads any more.
        return work()
