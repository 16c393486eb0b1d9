"""Claims the run directory of a job, and names and finds the directories of the job's processes."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mpinspect.run.options import LaunchOptions, Rank
from mpinspect.run.record import FILE_NAME, job_of, write_first
from mpinspect.runtime.appending import locked


class UnusableDirectoryError(Exception):
    """The requested run directory can't be made; the message is one sentence."""


#: Folder of the sums over all ranks, which rank 0 writes during training; it has a directory for each model.
ALL_RANKS = "all-ranks"
#: Arguments of scripts that name the folder of their output.
_OUTPUTS = ("output_dir", "out_dir", "outdir", "save_dir", "work_dir", "log_dir", "logdir")
#: Most names that are tried if the wanted directory already holds another run.
_SIBLINGS = 1000
#: Matches the names of process directories.
_PROCESS = re.compile(r"(rank|process-)\d+")


def claim(options: LaunchOptions, rank: Rank, record: dict[str, Any]) -> tuple[Path, str]:
    """Make this process's run directory, and claim it by creating run.json, which must not exist yet.

    Args:
        record: the fields of run.json; "job" identifies the job, so that its ranks share a directory.

    Returns:
        The absolute path of the whole job's directory, which without ranks is this process's own; and a sentence if it
        is not the wanted directory, else "".

    Raises:
        UnusableDirectoryError: the directory in ``options`` can't be made.
        OSError: not even a temporary directory can be made.
    """
    wanted = Path(options.log_dir or _beside_output(options) or Path("runs", _name(options, rank)))
    try:
        wanted = wanted.absolute()
        path, is_another = _claim_free(wanted, rank, record)
    except OSError as error:
        why = error.strerror or str(error)
        if wanted.exists() and not wanted.is_dir():
            why = "it is not a folder"
        if options.log_dir:
            raise UnusableDirectoryError(f"--log-dir {options.log_dir} can't be used: {why}") from error
        import tempfile

        path = Path(tempfile.mkdtemp(prefix="mpinspect-"))
        write_first(path / rank.folder, record)
        return path, f"{shown(wanted)} can't be used ({why}): recording into {shown(path)} instead"
    if is_another and options.log_dir is not None:
        return path, f"{shown(wanted)} holds another run already: recording into {shown(path)}"
    return path, ""


def shown(path: Path, start: str = "") -> str:
    """Return a path as the user would write it: relative if it is inside ``start`` (by default, the working directory)."""
    with suppress(OSError, ValueError):
        return str(path.relative_to(start or Path.cwd()))
    return str(path)


def process_name(directory: Path) -> str:
    """Return a process's name, derived from its directory's: "rank 1", "process-0"; "" for a run directory itself."""
    if not _PROCESS.fullmatch(directory.name):
        return ""
    return directory.name.replace("rank", "rank ")


def others_of(directory: Path, whole: Path) -> list[Path]:
    """Return the directories of the other ranks in ``whole``, and of the processes spawned by this one, in order."""
    found = [*ranks_of(whole), *directory.glob("process-*")]
    return sorted(
        (path for path in found if path != directory and process_name(path)), key=lambda path: in_order(path.name)
    )


def ranks_of(whole: Path) -> list[Path]:
    """Return the directories of the ranks that have one so far, in order."""
    return sorted((path for path in whole.glob("rank*") if process_name(path)), key=lambda path: in_order(path.name))


def in_order(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts rank2 before rank10, and rank0/process-1 after rank0."""
    stems = [(part, part.rstrip("0123456789")) for part in name.split("/")]
    return [(stem, int(part[len(stem) :] or 0)) for part, stem in stems]


def _beside_output(options: LaunchOptions) -> Path | None:
    """Return a directory next to the output folder that an argument of the script names; None without such an argument.

    None too if that folder's parent does not exist yet: creating it could change the script's behaviour. The directory is
    never inside the folder, since some scripts delete the folder or require it to be empty.
    """
    named = _output_folder(options.arguments)
    if not named or "://" in named:
        return None
    folder = Path(os.path.abspath(named))  # noqa: PTH100  as the script would, without following links
    is_around_us = folder == Path.cwd() or folder in Path.cwd().parents
    if is_around_us or not folder.parent.is_dir():
        return None
    return folder.with_name(f"{folder.name}-mpinspect")


def _output_folder(arguments: Sequence[str]) -> str:
    """Return the value of the first argument named in ``_OUTPUTS``, after "=" or as the next word; "" without one."""
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name.strip("-").replace("-", "_").lower() in _OUTPUTS:
            if equals or following.startswith("-"):
                return value
            return following
    return ""


def _name(options: LaunchOptions, rank: Rank) -> str:
    now = datetime.datetime.now()
    if rank.of > 1:
        # The ranks of a job start at different seconds, under one launcher.
        return f"{options.stem}-{now:%Y%m%d}-{os.getppid()}"
    return f"{options.stem}-{now:%Y%m%d-%H%M%S}"


def _claim_free(wanted: Path, rank: Rank, record: dict[str, Any]) -> tuple[Path, bool]:
    """Claim the wanted directory or the next free name, and return its path and whether it is not the wanted one."""
    for number in range(1, _SIBLINGS):
        base = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        base.mkdir(parents=True, exist_ok=True)
        # Prevent two jobs that start together from both seeing a directory without other ranks.
        with locked(base):
            if not _is_foreign(base, rank) and write_first(base / rank.folder, record):
                return base, number > 1
    raise OSError(f"{_SIBLINGS} similar names are taken")


def _is_foreign(base: Path, rank: Rank) -> bool:
    """Return whether the directory holds another job's ranks, or a run without ranks while this process has a rank."""
    jobs = [job_of(path.parent) for path in base.glob(f"rank*/{FILE_NAME}")]
    if rank.of < 2:
        return bool(jobs)
    return (base / FILE_NAME).exists() or any(job is not None and job != rank.job for job in jobs)
