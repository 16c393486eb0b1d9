"""``mpinspect run``: somebody's script, unmodified, with the inspector attached to what it trains. Needs no torch to begin."""

from __future__ import annotations

import atexit
import threading
from pathlib import PurePath
from typing import TYPE_CHECKING

from mpinspect.run import leaving, processes, script
from mpinspect.run.directory import UnusableDirectoryError, claim, shown
from mpinspect.run.ending import Ending
from mpinspect.run.import_hook import when_imported
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import brief
from mpinspect.run.rank import Rank
from mpinspect.run.record import first_record
from mpinspect.run.stderr import say

if TYPE_CHECKING:
    from mpinspect.run.report import RunReport

__all__ = ["LaunchOptions", "UnusableDirectoryError", "launch"]

#: Programs that start the training in processes of their own, by how they are called.
_LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"))


def launch(options: LaunchOptions) -> RunReport | None:
    """Run a script as Python would. What was seen of it is reported when the process ends, after its own exit handlers.

    Returns:
        None; but if ``fail_on`` asks for findings and the script ended with 0, its threads and exit handlers have run too, and
        this is the report (None if it could not be made).

    Raises:
        UnusableDirectoryError: the run directory that was asked for can't be made; the script has not begun.
        BaseException: whatever ends the script passes through: SystemExit and KeyboardInterrupt do what they do in Python.
    """
    ending = None
    try:
        run = script.load(options)
        ending = _begin(options)
        run()
    except UnusableDirectoryError:
        raise
    except BaseException as error:
        _left_by(error, ending)
        if ending is None or not options.fail_on or ending.outcome.status != 0:
            raise
    else:
        script.forget_file()
    return _finished(ending) if ending is not None and options.fail_on else None


def _begin(options: LaunchOptions) -> Ending | None:
    """Have all that the script does from now on looked at. None where that fails: the script runs all the same."""
    try:
        rank = Rank.of_environment()
        record = first_record(options, rank)
        whole, trouble = claim(options, rank, record)
        ending = Ending(options, whole / rank.folder, record, speaks=rank.number == 0, whole=whole)
        if trouble:
            ending.seen.note(trouble)
        if PurePath(options.target).name in _LAUNCHERS:
            ending.seen.note(_advice(options))
        # Before anybody else: exit handlers run last in, first out.
        atexit.register(ending.finish)
        processes.follow(ending)
        when_imported("torch", ending.watch)
    except UnusableDirectoryError:
        raise
    except Exception as error:
        say(f"the script runs unwatched: {brief(error)}")
        return None
    if rank.number == 0:
        where = trouble or f"recording into {shown(whole)}"
        say(f"{where} (mpinspect report reads it back, even if the run is killed)")
    return ending


def _advice(options: LaunchOptions) -> str:
    name = PurePath(options.target).name
    return (
        f"{name} starts the training in processes of its own, which are not seen from here: let it start mpinspect, as in "
        "torchrun --nproc-per-node 8 -m mpinspect run train.py"
    )


def _left_by(error: BaseException, ending: Ending | None) -> None:
    """An exception ends the script."""
    try:
        if not isinstance(error, SystemExit):
            leaving.show_without_our_frames(script.forget_file)
        if ending is not None:
            ending.left_by(error)
            ending.started = not script.was_not_found(error)
    except Exception as fault:
        say(f"mpinspect failed as the script ended: {brief(fault)}")


def _finished(ending: Ending) -> RunReport | None:
    """What the interpreter does at exit, done now: the report must be known before the exit status is."""
    shut_down = getattr(threading, "_shutdown", None)
    if shut_down is not None:
        shut_down()
    atexit._run_exitfuncs()
    return ending.report
