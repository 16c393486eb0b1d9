"""The run directory: where it is, and who claims it."""

from __future__ import annotations

import datetime
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpinspect.run.options import LaunchOptions
from mpinspect.run.rank import Rank
from mpinspect.run.record import FILE_NAME, job_of, write_first


class UnusableDirectoryError(Exception):
    """The directory that was asked for can't be made: one sentence."""


#: How many sibling names are tried where one holds another run already.
_SIBLINGS = 1000


def claim(options: LaunchOptions, rank: Rank, record: dict[str, Any]) -> tuple[Path, str]:
    """Make the run directory of this process, with a first run.json in it that nobody else has written.

    Args:
        record: what the first run.json holds; its "job" tells the ranks of one job from another's.

    Returns:
        Absolute path of the whole job's directory, which is that of this process where there are no ranks; and a sentence if
        it is not the one that was to be; else "".

    Raises:
        UnusableDirectoryError: the one that was asked for can't be made.
        OSError: not even a temporary directory can be made.
    """
    wanted = Path(options.log_dir) if options.log_dir else Path("runs") / _name(options, rank)
    try:
        wanted = wanted.absolute()
        path, is_another = _claim_free(wanted, rank, record)
    except OSError as error:
        why = "it is a file" if wanted.is_file() else error.strerror or str(error)
        if options.log_dir:
            raise UnusableDirectoryError(f"--log-dir {options.log_dir} can't be used: {why}") from error
        import tempfile

        path = Path(tempfile.mkdtemp(prefix="mpinspect-"))
        write_first(path / rank.folder, record)
        return path, f"{shown(wanted)} can't be used ({why}): recording into {shown(path)} instead"
    if is_another and options.log_dir is not None:
        return path, f"{shown(wanted)} holds another run already: recording into {shown(path)}"
    return path, ""


def shown(path: Path) -> str:
    """A path as the user would write it: relative to the working directory where it lies below that."""
    with suppress(OSError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _name(options: LaunchOptions, rank: Rank) -> str:
    now = datetime.datetime.now()
    # The ranks of a job start at different seconds, under one launcher.
    moment = f"{now:%Y%m%d-%H%M%S}" if rank.of < 2 else f"{now:%Y%m%d}-{os.getppid()}"
    return f"{options.stem}-{moment}"


def _claim_free(wanted: Path, rank: Rank, record: dict[str, Any]) -> tuple[Path, bool]:
    """The wanted directory of the whole job, or the next free name beside it; and whether it is another."""
    for number in range(1, _SIBLINGS):
        base = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not _is_foreign(base, rank) and write_first(base / rank.folder, record):
            return base, number > 1
    raise OSError(f"{_SIBLINGS} names beside it are taken")


def _is_foreign(base: Path, rank: Rank) -> bool:
    """Whether the ranks of another job are in there, or a run without ranks where this one has some."""
    jobs = [job_of(path.parent) for path in base.glob(f"rank*/{FILE_NAME}")]
    if rank.of < 2:
        return bool(jobs)
    return (base / FILE_NAME).exists() or any(job is not None and job != rank.job for job in jobs)
