"""Follows the script into its child processes, and makes the report before exits that skip exit handlers.

Forked children are not inspected. Spawned children inspect themselves: their process object carries a payload that
starts the inspection when unpickled.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpinspect.run.import_hook import when_imported
from mpinspect.run.options import LaunchOptions, Rank
from mpinspect.run.outcome import Outcome, outcome_of
from mpinspect.runtime.finalizing import until_finalized

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from mpinspect.run.ending import Ending

#: Modules whose processes take no part in training: data loader workers, manager servers.
_HELPERS = ("torch.utils.data.", "multiprocessing.managers")
#: The attribute of a process object that carries the payload.
_ATTRIBUTE = "_mpinspect_payload"
#: A finalizer priority lower than all others.
_LAST = -1_000_000

_PAYLOAD = """
try:
    import pickle
    from mpinspect.run import processes
    processes.begin_in_child(*pickle.loads({contents!r}))
except Exception:
    pass
"""


def follow(ending: Ending) -> None:
    """Begin to inspect spawned (not forked) children, and to report before ``os._exit`` and ``os.exec*``."""
    children = _Children(ending)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            after_in_parent=until_finalized(children.forked), after_in_child=until_finalized(ending.abandon)
        )
    when_imported("multiprocessing.process", children.follow_starts)
    _report_before_exit(ending)
    _report_before_exec(ending)


class _Children:
    """Counts the children of a process, and attaches the payload to those that multiprocessing spawns."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._starting_helper = False
        self._spawned = 0

    def forked(self) -> None:
        """Count a fork; called in the parent."""
        if not self._starting_helper:
            self._ending.seen.forked += 1

    def follow_starts(self) -> None:
        """Wrap ``BaseProcess.start``, which starts all children; called when multiprocessing has been imported."""
        from multiprocessing.process import BaseProcess

        original = BaseProcess.start
        before, after = until_finalized(self._before), until_finalized(self._after)

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            before(process)
            try:
                original(process)
            finally:
                after(process)

        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def _before(self, process: BaseProcess) -> None:
        with suppress(Exception):
            self._starting_helper = _is_helper(process)
            if self._ending.over or self._starting_helper or _method(process) == "fork":
                return
            place = self._ending.directory / f"process-{self._spawned}"
            payload = SpawnPayload(self._ending.options, place, self._ending.speaks and self._spawned == 0)
            process.__dict__[_ATTRIBUTE] = payload
            self._ending.seen.spawned += 1
            self._ending.seen.watched_children += payload.can_be_unpickled
            self._spawned += 1

    def _after(self, process: BaseProcess) -> None:
        self._starting_helper = False
        with suppress(Exception):
            process.__dict__.pop(_ATTRIBUTE, None)


def _is_helper(process: BaseProcess) -> bool:
    module = getattr(getattr(process, "_target", None), "__module__", None)
    return isinstance(module, str) and module.startswith(_HELPERS)


def _method(process: BaseProcess) -> str:
    """Return how a process will be started: "fork", "spawn" or "forkserver"."""
    import multiprocessing

    own: str | None = getattr(process, "_start_method", None)
    return own or multiprocessing.get_start_method()


def _report_before_exit(ending: Ending) -> None:
    """Wrap ``os._exit``, which runs no exit handlers, to make the report first."""
    leave = os._exit

    @until_finalized
    def report(status: int) -> None:
        _report_now(ending, Outcome(f"left by os._exit, status {status}", status))

    @functools.wraps(leave)
    def exit_at_once(status: int) -> NoReturn:
        report(status)
        leave(status)

    os._exit = exit_at_once


def _report_before_exec(ending: Ending) -> None:
    """Wrap ``os.execv`` and ``os.execve``, which run no exit handlers, to make the report first."""

    @until_finalized
    def report(path: Any) -> None:
        # os.execvp tries one directory after another: report only before the call that will succeed.
        if isinstance(path, int) or os.access(path, os.X_OK):
            _report_now(ending, Outcome("replaced by another program, which was not seen", None))

    def wrap(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(execute)
        def replace_process(path: Any, *rest: Any) -> NoReturn:
            report(path)
            execute(path, *rest)

        return replace_process

    os.execv = wrap(os.execv)
    os.execve = wrap(os.execve)


def _report_now(ending: Ending, outcome: Outcome) -> None:
    with suppress(Exception):
        ending.finish_soon(outcome)


# -- spawned children ----------------------------------------------------------------------------------------------------


class SpawnPayload:
    """Starts the inspection in the child process that unpickles it.

    It is pickled as Python source, so that a child that can't import mpinspect still runs, uninspected.
    """

    def __init__(self, options: LaunchOptions, directory: Path, speaks: bool) -> None:
        self._contents = pickle.dumps((options, str(directory), speaks))

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_PAYLOAD.format(contents=self._contents), {})

    @property
    def can_be_unpickled(self) -> bool:
        """Whether the child, which inherits this process's sys.path, will find mpinspect."""
        finders = [find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)) is not None]
        return any(find("mpinspect", None) is not None for find in finders)


def begin_in_child(options: LaunchOptions, directory: str, speaks: bool) -> None:
    """Begin to inspect this spawned process, and make its report when its function has returned or raised."""
    from multiprocessing import util

    from mpinspect.run.ending import Ending
    from mpinspect.run.record import first_record

    record = first_record(options, Rank.of_environment())
    ending = Ending(options, Path(directory), record, speaks=speaks, leaves_no_trace=True)
    follow(ending)
    _end_with_the_process(ending)
    # A forkserver's child clears its finalizers before it runs the process's function; this registers them again.
    util.register_after_fork(ending, _end_with_the_process)
    if sys.version_info >= (3, 13):
        _note_error(ending)
    when_imported("torch", ending.watch)


def _end_with_the_process(ending: Ending) -> None:
    from multiprocessing import util

    util.Finalize(None, _end, args=(ending,), exitpriority=_LAST)


def _end(ending: Ending) -> None:
    # Before Python 3.13, finalizers run in the ``finally`` around the process's function, while its exception is handled.
    error = sys.exc_info()[1]
    if error is not None:
        ending.outcome = _outcome(error)
    ending.finish()


def _note_error(ending: Ending) -> None:
    """Note the exception of the process's function: from Python 3.13 on finalizers run after it has been handled."""
    from multiprocessing.process import BaseProcess

    bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def begin(process: BaseProcess, *args: Any, **kwargs: Any) -> Any:
        own = process.run

        def run() -> None:
            del process.run
            try:
                own()
            except BaseException as error:
                ending.outcome = _outcome(error)
                # The printed traceback omits this frame.
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                raise

        BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]
        process.run = run  # type: ignore[method-assign]
        return bootstrap(process, *args, **kwargs)

    BaseProcess._bootstrap = begin  # type: ignore[attr-defined]


def _outcome(error: BaseException) -> Outcome:
    """Return the child's outcome; if torch.multiprocessing turned an exception into SystemExit, name the exception."""
    outcome = outcome_of(error)
    cause = error.__context__
    if isinstance(error, SystemExit) and outcome.status and isinstance(cause, Exception):
        return replace(outcome_of(cause), status=outcome.status)
    return outcome
