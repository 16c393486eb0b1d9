"""A spawned process's own watching: what its parent gives it on the way, and how it begins and ends there."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Outcome, outcome_of

if TYPE_CHECKING:
    from mpinspect.run.ending import Ending

#: Under this name a letter travels in the process object's own attributes.
ATTRIBUTE = "_mpinspect_letter"

#: A finalizer's priority below everybody else's.
_LAST = -1_000_000

_OPENING = """
try:
    import pickle
    from mpinspect.run import spawned
    spawned.begin(*pickle.loads({contents!r}))
except Exception:
    pass
"""


class Letter:
    """Begins the watching in the process in which it is unpickled, after the main module and the arguments.

    It travels as plain Python text, so that a child that can't import mpinspect is simply not watched.
    """

    def __init__(self, options: LaunchOptions, directory: Path, speaks: bool) -> None:
        self._contents = pickle.dumps((options, str(directory), speaks))

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_OPENING.format(contents=self._contents), {})

    @property
    def can_be_read(self) -> bool:
        """Whether the child, which gets this process's sys.path, will find mpinspect."""
        finders = [find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)) is not None]
        return any(find("mpinspect", None) is not None for find in finders)


def begin(options: LaunchOptions, directory: str, speaks: bool) -> None:
    """In the child: watch it, and report when its function has returned or raised."""
    from multiprocessing import util

    from mpinspect.run.ending import Ending
    from mpinspect.run.import_hook import when_imported
    from mpinspect.run.processes import follow
    from mpinspect.run.rank import Rank
    from mpinspect.run.record import first_record

    record = first_record(options, Rank.of_environment())
    ending = Ending(options, Path(directory), record, speaks=speaks, leaves_no_trace=True)
    follow(ending)
    _end_with_the_process(ending)
    # A forkserver's child throws away the finalizers that it has as the process proper begins.
    util.register_after_fork(ending, _end_with_the_process)
    when_imported("torch", ending.watch)


def _end_with_the_process(ending: Ending) -> None:
    from multiprocessing import util

    util.Finalize(None, _end, args=(ending,), exitpriority=_LAST)


def _end(ending: Ending) -> None:
    # Where the process's function has raised, this runs in the finally around it.
    error = sys.exc_info()[1]
    if error is not None:
        ending.outcome = _outcome(error)
    ending.finish()


def _outcome(error: BaseException) -> Outcome:
    """torch.multiprocessing keeps a function's exception for the parent, and exits: what it came from is the one to name."""
    outcome = outcome_of(error)
    cause = error.__context__
    if isinstance(error, SystemExit) and outcome.status and isinstance(cause, Exception):
        return replace(outcome_of(cause), status=outcome.status)
    return outcome
