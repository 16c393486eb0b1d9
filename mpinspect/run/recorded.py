"""Reading run.json back: of a run that ended, goes on or was killed, and of a file that somebody has damaged."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from mpinspect.run.record import FILE_NAME, load_record
from mpinspect.runtime.decoding import Between, DecodingError, typed

#: Of a process that is not there any more, and that wrote no end.
GONE = "ended without a report (killed, or it crashed)"
RUNNING = "running still, or killed"


#: A process's number, a pid_t.
_Process: Any = Annotated[int, Between(1, (1 << 31) - 1)]


@dataclass(frozen=True)
class Recorded:
    """What run.json says of a process, as far as it can be read.

    Args:
        command: the script and its arguments; "" where unknown.
        outcome: how it ended, in words; "unknown" where that is.
        ended: whether it wrote its end, with the report.
        saw: what was seen; nothing before the end.
        models: names of the directories of the models that were recorded; none before the end.
        trouble: what is wrong with the file, as a sentence; "" where nothing is.
    """

    command: str = ""
    outcome: str = "unknown"
    ended: bool = False
    saw: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    trouble: str = ""


def read_record(directory: Path) -> Recorded:
    """The record of the process that wrote to this directory. Raises nothing."""
    try:
        return _understood(load_record(directory))
    except FileNotFoundError:
        return Recorded(trouble=f"{FILE_NAME} is missing: what ran, and how it ended, is not known")
    except OSError as error:
        return Recorded(trouble=f"{FILE_NAME} can't be read: {error.strerror or error}")
    except DecodingError as error:
        return Recorded(trouble=f"{FILE_NAME} is damaged and says nothing: it {error}")


def _understood(record: dict[str, Any]) -> Recorded:
    damaged: list[str] = []
    command = _field(record, "command", str, damaged) or ""
    outcome = _field(record, "outcome", str, damaged) or "unknown"
    has_ended = outcome not in ("running", "unknown")
    saw = _field(record, "saw", tuple[str, ...], damaged, needed=has_ended) or ()
    models = _field(record, "models", tuple[_Model, ...], damaged, needed=has_ended) or ()
    trouble = f"{FILE_NAME} is damaged: {', '.join(damaged)} can't be read" if damaged else ""
    if outcome == "running":
        outcome = GONE if _is_gone(record) else RUNNING
    # One of which nothing could be written has no directory.
    directories = tuple(PurePath(model.log_dir).name for model in models if model.log_dir is not None)
    return Recorded(command, outcome, has_ended, saw, directories, trouble)


@dataclass(frozen=True)
class _Model:
    log_dir: str | None = None


Value = TypeVar("Value")


def _field(
    record: dict[str, Any], name: str, kind: type[Value], damaged: list[str], *, needed: bool = True
) -> Value | None:
    """A field's value; None where it is not what it should be, and its name then goes to ``damaged``."""
    if name not in record and not needed:
        return None
    try:
        return typed(kind, record.get(name))
    except DecodingError:
        damaged.append(name)
        return None


def _is_gone(record: dict[str, Any]) -> bool:
    """Whether the process ran on this machine and is no more."""
    process = _field(record, "process", _Process, [])
    if os.name != "posix" or record.get("host") != platform.node() or process is None:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
