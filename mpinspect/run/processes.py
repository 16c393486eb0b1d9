"""What becomes of the watching where the script makes processes, or leaves without running its exit handlers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from mpinspect.run import spawned
from mpinspect.run.import_hook import when_imported
from mpinspect.run.outcome import Outcome

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from mpinspect.run.ending import Ending

#: Processes that compute nothing of the training: data loaders' workers, managers' servers.
_HELPERS = ("torch.utils.data.", "multiprocessing.managers")


def follow(ending: Ending) -> None:
    """From now on forked children do without the watching, spawned ones get their own, and no way out is missed."""
    children = _Children(ending)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=children.forked, after_in_child=ending.abandon)
    when_imported("multiprocessing.process", children.follow_starts)
    _report_before_exit(ending)
    _report_before_exec(ending)


class _Children:
    """Counts the children of a process, and hands spawned ones what they need to watch themselves."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._starting_helper = False
        self._spawned = 0

    def forked(self) -> None:
        """In the parent of a fork."""
        if not self._starting_helper:
            self._ending.seen.forked += 1

    def follow_starts(self) -> None:
        """multiprocessing has been imported: every process of it begins at one method."""
        from multiprocessing.process import BaseProcess

        original = BaseProcess.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            self._before(process)
            try:
                original(process)
            finally:
                self._after(process)

        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def _before(self, process: BaseProcess) -> None:
        with suppress(Exception):
            self._starting_helper = _is_helper(process)
            if self._ending.over or self._starting_helper or _method(process) == "fork":
                return
            place = self._ending.directory / f"process-{self._spawned}"
            letter = spawned.Letter(self._ending.options, place, self._ending.speaks and self._spawned == 0)
            process.__dict__[spawned.ATTRIBUTE] = letter
            self._ending.seen.spawned += 1
            self._ending.seen.watched_children += letter.can_be_read
            self._spawned += 1

    def _after(self, process: BaseProcess) -> None:
        self._starting_helper = False
        with suppress(Exception):
            process.__dict__.pop(spawned.ATTRIBUTE, None)


def _is_helper(process: BaseProcess) -> bool:
    module = getattr(getattr(process, "_target", None), "__module__", None)
    return isinstance(module, str) and module.startswith(_HELPERS)


def _method(process: BaseProcess) -> str:
    """How it will be started: "fork", "spawn" or "forkserver"."""
    import multiprocessing

    own: str | None = getattr(process, "_start_method", None)
    return own or multiprocessing.get_start_method()


def _report_before_exit(ending: Ending) -> None:
    """os._exit runs no exit handlers."""
    leave = os._exit

    @functools.wraps(leave)
    def exit_at_once(status: int) -> NoReturn:
        _last_words(ending, Outcome(f"left by os._exit, status {status}", status))
        leave(status)

    os._exit = exit_at_once


def _report_before_exec(ending: Ending) -> None:
    """Nor does another program in the place of this one."""

    def wrap(replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(replace)
        def replace_process(path: Any, *rest: Any) -> NoReturn:
            # os.execvp tries one directory after the other.
            if isinstance(path, int) or os.access(path, os.X_OK):
                _last_words(ending, Outcome("replaced by another program, which was not seen", None))
            replace(path, *rest)

        return replace_process

    os.execv = wrap(os.execv)
    os.execve = wrap(os.execve)


def _last_words(ending: Ending, outcome: Outcome) -> None:
    with suppress(Exception):
        ending.finish_soon(outcome)
