"""run.json: what was run, how it ended, what was seen. It is there from the start, so that a killed run tells as much."""

from __future__ import annotations

import datetime
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpinspect.run.options import LaunchOptions
from mpinspect.run.rank import Rank
from mpinspect.runtime.decoding import DecodingError, json_of
from mpinspect.runtime.version import __version__

FILE_NAME = "run.json"
#: What else lies beside it: the report in two forms, and with --kernels the trace.
REPORTS = ("report.md", "report.json")
TRACE = "trace.json.gz"


def first_record(options: LaunchOptions, rank: Rank) -> dict[str, Any]:
    """What is known at the start."""
    return {
        "schema": "mpinspect.run",
        "version": 1,
        "command": options.command,
        "target": options.target,
        "is_module": options.is_module,
        "arguments": list(options.arguments),
        "working_directory": _working_directory(),
        "started": now(),
        "ended": None,
        "outcome": "running",
        "status": None,
        "by_error": False,
        "process": os.getpid(),
        "host": platform.node(),
        "rank": rank.number,
        "world_size": rank.of,
        "job": rank.job,
        "versions": {"mpinspect": __version__, "python": platform.python_version()},
    }


def write_first(directory: Path, record: dict[str, Any]) -> bool:
    """Write run.json if there is none, parent directories too: False if there is one. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with (directory / FILE_NAME).open("x", encoding="utf-8") as file:
            file.write(_text(record))
    except FileExistsError:
        return False
    return True


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Put run.json in place, whole or not at all; a directory that was removed meanwhile is made again. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    beside = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        beside.write_text(_text(record), encoding="utf-8")
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()


def load_record(directory: Path) -> dict[str, Any]:
    """The fields of a directory's run.json, unchecked.

    Raises:
        DecodingError: it holds no JSON object.
        OSError: it can't be read.
    """
    record = json_of(directory / FILE_NAME)
    if not isinstance(record, dict):
        raise DecodingError("holds no record")
    return record


def job_of(directory: Path) -> str | None:
    """The job of a directory's run.json; None where it can't be told, as while another rank writes it."""
    with suppress(OSError, DecodingError):
        job = load_record(directory).get("job")
        return job if isinstance(job, str) else None
    return None


def now() -> str:
    """This moment, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _text(record: dict[str, Any]) -> str:
    # Escaped: a file name need not be valid UTF-8.
    return json.dumps(record, indent=1, ensure_ascii=True) + "\n"


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
