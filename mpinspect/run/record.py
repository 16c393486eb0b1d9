"""Writes run.json at the start and end of a process, and reads it: the command, its outcome, and the notes on the run."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from mpinspect.run.options import MOST_RANKS, LaunchOptions, Rank
from mpinspect.runtime.appending import replace_whole, timestamp, write_all
from mpinspect.runtime.decoding import Between, DecodingError, json_of, typed
from mpinspect.runtime.version import __version__

FILE_NAME = "run.json"
#: Names of the other files in the directory of run.json: the report in three forms and, with --kernels, the trace.
PAGE = "report.html"
REPORTS = ("report.md", "report.json", PAGE)
TRACE = "trace.json.gz"
#: File to which a SIGTERM that ends a rank writes the stack.
SIGTERM = ".sigterm"

#: Outcomes reported for a process that has not written its final run.json.
KILLED = "ended without a report (killed, or it crashed)"
STOPPED = "ended by a SIGTERM"
STILL_RUNNING = "still running, or killed"
#: A process ID (pid_t).
_Process: Any = Annotated[int, Between(1, (1 << 31) - 1)]
_Ranks: Any = Annotated[int, Between(1, MOST_RANKS)]
#: Types of options that may be missing.
_Flag: Any = bool | None
_Text: Any = str | None

# -- writing -------------------------------------------------------------------------------------------------------------


def first_record(options: LaunchOptions, rank: Rank) -> dict[str, Any]:
    """Return the fields of run.json that are known at the start."""
    return {
        "schema": "mpinspect.run",
        "version": 1,
        "command": options.command,
        "target": options.target,
        "is_module": options.is_module,
        "is_code": options.is_code,
        "arguments": list(options.arguments),
        "lint": options.lint,
        "gpu": options.gpu,
        "working_directory": _working_directory(),
        "started": timestamp(),
        "ended": None,
        "outcome": "running",
        "status": None,
        "by_error": False,
        "process": os.getpid(),
        "host": platform.node(),
        "rank": rank.number,
        "world_size": rank.of,
        "local_world_size": rank.here,
        "job": rank.job,
        "versions": {"mpinspect": __version__, "python": platform.python_version()},
    }


def write_first(directory: Path, record: dict[str, Any]) -> bool:
    """Create the directory and its run.json; return False if a run.json exists already. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError:
        return False
    try:
        with file:
            write_all(file, _bytes(record))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Replace run.json atomically, creating the directory again if it was removed. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_whole(directory / FILE_NAME, _bytes(record))


def load_record(directory: Path) -> dict[str, Any]:
    """Return the fields of a directory's run.json, unchecked.

    Raises:
        DecodingError: run.json holds no JSON object.
        OSError: run.json can't be read.
    """
    record = json_of(directory / FILE_NAME)
    if not isinstance(record, dict):
        raise DecodingError("holds no record")
    return record


def job_of(directory: Path) -> str | None:
    """Return the job in a directory's run.json; None if unreadable, for example while another rank writes the file."""
    with suppress(OSError, DecodingError):
        job = load_record(directory).get("job")
        return job if isinstance(job, str) else None
    return None


def _bytes(record: dict[str, Any]) -> bytes:
    # ASCII, since file names in the record need not be valid UTF-8.
    return f"{json.dumps(record, indent=1, ensure_ascii=True)}\n".encode("ascii")


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessRecord:
    """The readable fields of a process's run.json.

    Args:
        command: the script and its arguments; "" if unknown.
        outcome: how the process ended, in words; "unknown" if the field can't be read.
        ended: whether the process wrote its final run.json, and so its report.
        saw: sentences on the run's observed and unobserved parts; empty until the process has ended.
        models: names of the recorded models' directories; empty until the process has ended.
        trouble: a sentence on the damage of run.json; "" if it is intact.
        world_size: number of processes that the launcher started; 1 if unknown.
        ranks_here: number of ranks that it started on this process's machine; None if unknown.
        host: that machine's name; "" if unknown.
        job: identifies the launch, the same in all its processes; "" if unknown.
        lint: whether the user requested the shapes with --lint; None if the user did not choose, or if unknown.
        gpu: the GPU of --gpu; None without --gpu, or if unknown.
        by_error: whether an uncaught exception ended the process.
    """

    command: str = ""
    outcome: str = "unknown"
    ended: bool = False
    saw: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    trouble: str = ""
    world_size: int = 1
    job: str = ""
    lint: bool | None = None
    gpu: str | None = None
    by_error: bool = False
    ranks_here: int | None = None
    host: str = ""

    @property
    def ended_early(self) -> bool:
        """Whether the process was killed or failed before its script had ended."""
        return self.by_error or self.outcome in (KILLED, STOPPED) or self.outcome.startswith("exit status")


def read_record(directory: Path) -> ProcessRecord:
    """Return the record of the process that wrote to this directory; never raises."""
    try:
        record = _understood(load_record(directory))
        if record.outcome == KILLED and _holds_something(directory / SIGTERM):
            return replace(record, outcome=STOPPED)
        return record
    except FileNotFoundError:
        return ProcessRecord(trouble=f"{FILE_NAME} is missing: the command and its outcome are unknown")
    except OSError as error:
        return ProcessRecord(trouble=f"{FILE_NAME} can't be read: {error.strerror or error}")
    except DecodingError as error:
        return ProcessRecord(trouble=f"{FILE_NAME} is damaged and was ignored: it {error}")


def _holds_something(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except OSError:
        return False


def _understood(record: dict[str, Any]) -> ProcessRecord:
    damaged: list[str] = []
    command = _field(record, "command", str, damaged) or ""
    outcome = _field(record, "outcome", str, damaged) or "unknown"
    has_ended = outcome not in ("running", "unknown")
    saw = _field(record, "saw", tuple[str, ...], damaged, needed=has_ended) or ()
    models = _field(record, "models", tuple[_Model, ...], damaged, needed=has_ended) or ()
    lint, gpu = _field(record, "lint", _Flag, damaged), _field(record, "gpu", _Text, damaged)
    world_size = _field(record, "world_size", _Ranks, damaged, needed=False) or 1
    ranks_here = _field(record, "local_world_size", _Ranks | None, damaged, needed=False)
    trouble = ""
    if damaged:
        trouble = f"{FILE_NAME} is damaged: {', '.join(damaged)} can't be read"
    if outcome == "running":
        outcome = KILLED if _is_gone(record) else STILL_RUNNING
    # A model whose files could not be written has no directory.
    directories = tuple(PurePath(model.log_dir).name for model in models if model.log_dir is not None)
    job, host = (_field(record, name, str, [], needed=False) or "" for name in ("job", "host"))
    by_error = _field(record, "by_error", bool, [], needed=False) or False
    here = ranks_here, host
    return ProcessRecord(
        command, outcome, has_ended, saw, directories, trouble, world_size, job, lint, gpu, by_error, *here
    )


@dataclass(frozen=True)
class _Model:
    log_dir: str | None = None


Value = TypeVar("Value")


def _field(
    record: dict[str, Any], name: str, kind: type[Value], damaged: list[str], *, needed: bool = True
) -> Value | None:
    """Return a field's value; if it is not of type ``kind``, add its name to ``damaged`` and return None."""
    if name not in record and not needed:
        return None
    try:
        return typed(kind, record.get(name))
    except DecodingError:
        damaged.append(name)
        return None


def _is_gone(record: dict[str, Any]) -> bool:
    """Return whether the process ran on this machine and has ended; False if this can't be determined."""
    process = _field(record, "process", _Process, [])
    if os.name != "posix" or record.get("host") != platform.node() or process is None:
        return False
    try:
        os.kill(process, 0)
        # A process that has ended exists as a zombie until its parent waits for it.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False
