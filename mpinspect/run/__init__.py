"""``mpinspect run``: runs an unmodified script and inspects the models it trains. Does not import torch itself."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import PurePath
from typing import TYPE_CHECKING

from mpinspect.run import processes, script
from mpinspect.run.directory import UnusableDirectoryError, claim, shown
from mpinspect.run.ending import Ending, say
from mpinspect.run.import_hook import when_imported
from mpinspect.run.options import LaunchOptions, Rank
from mpinspect.run.record import first_record
from mpinspect.runtime.briefly import brief

if TYPE_CHECKING:
    from mpinspect.run.report import RunReport

__all__ = ["LaunchOptions", "UnusableDirectoryError", "launch"]

#: Programs that start the training in separate processes, by name or module.
_LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"))


def launch(options: LaunchOptions) -> RunReport | None:
    """Run a script as Python would, and make the report when the process ends, after the script's own exit handlers.

    Returns:
        With ``fail_on``, if the script's exit status is 0: the report, made after the script's threads have ended and
        its exit handlers have run; None if it could not be made. Otherwise None.

    Raises:
        UnusableDirectoryError: the requested run directory can't be made; the script has not begun.
        BaseException: any exception that ends the script, including SystemExit and KeyboardInterrupt.
    """
    ending = None
    try:
        run = script.load(options)
        ending = _begin(options)
        run()
    except UnusableDirectoryError:
        raise
    except BaseException as error:
        _note_error(error, ending)
        if ending is None or not options.fail_on or ending.outcome.status != 0:
            raise
    else:
        script.forget_file()
    if ending is None or not options.fail_on:
        return None
    return _report_now(ending)


def _begin(options: LaunchOptions) -> Ending | None:
    """Set up the inspection and return its ``Ending``, or None if this fails; the script then runs uninspected."""
    try:
        rank = Rank.of_environment()
        record = first_record(options, rank)
        whole, trouble = claim(options, rank, record)
        ending = Ending(options, whole / rank.folder, record, speaks=rank.number == 0, whole=whole)
        if trouble:
            ending.seen.note(trouble)
        if not options.is_code and PurePath(options.target).name in _LAUNCHERS:
            ending.seen.note(_advice(options))
        # Exit handlers run last in, first out: registered before the script's own, this one runs after them.
        atexit.register(ending.finish)
        processes.follow(ending)
        when_imported("torch", ending.watch)
    except UnusableDirectoryError:
        raise
    except Exception as error:
        say(f"the script runs uninspected: {brief(error)}")
        return None
    # On other machines the directory may have another name, or lie on a disk that rank 0 does not see.
    if rank.number == 0 or trouble or (rank.of > 1 and os.environ.get("LOCAL_RANK") == "0"):
        where = trouble or f"recording into {shown(whole)}"
        if rank.of > 1:
            where = f"rank {rank.number}: {where}"
        say(f"{where} (mpinspect report reads it back, even if the run is killed)")
    return ending


def _advice(options: LaunchOptions) -> str:
    name = PurePath(options.target).name
    return (
        f"{name} starts the training in separate processes, which can't be inspected from here: let it start mpinspect, as in "
        "torchrun --nproc-per-node 8 -m mpinspect run train.py"
    )


def _note_error(error: BaseException, ending: Ending | None) -> None:
    """Record the exception that ends the script, and remove mpinspect's frames from its printed traceback."""
    try:
        if not isinstance(error, SystemExit):
            script.show_without_our_frames(script.forget_file)
        if ending is not None:
            ending.left_by(error)
            ending.started = not script.was_not_found(error)
    except Exception as fault:
        say(f"mpinspect failed as the script ended: {brief(fault)}")


def _report_now(ending: Ending) -> RunReport | None:
    """Join threads and run exit handlers now instead of at exit, since the exit status depends on the report."""
    shut_down = getattr(threading, "_shutdown", None)
    if shut_down is not None:
        shut_down()
    atexit._run_exitfuncs()
    return ending.report
