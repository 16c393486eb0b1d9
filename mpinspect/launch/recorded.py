"""Reading run.json back: of a run that ended, goes on or was killed, and of a file that somebody has damaged."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from mpinspect.launch.record import FILE_NAME

#: Of a process that is not there any more, and that wrote no end.
GONE = "ended without a report (killed, or it crashed)"
RUNNING = "running still, or killed"


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
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Recorded(trouble=f"{FILE_NAME} is missing: what ran, and how it ended, is not known")
    except (OSError, ValueError, RecursionError) as error:
        return Recorded(trouble=f"{FILE_NAME} is damaged and says nothing: {error}")
    if not isinstance(record, dict):
        return Recorded(trouble=f"{FILE_NAME} is damaged and says nothing: it holds no record")
    return _understood(record)


def _understood(record: dict[str, Any]) -> Recorded:
    damaged: list[str] = []
    command = _field(record, "command", _text, damaged) or ""
    outcome = _field(record, "outcome", _text, damaged) or "unknown"
    has_ended = outcome not in ("running", "unknown")
    saw = _field(record, "saw", _texts, damaged, needed=has_ended) or ()
    models = _field(record, "models", _directories, damaged, needed=has_ended) or ()
    trouble = f"{FILE_NAME} is damaged: {', '.join(damaged)} can't be read" if damaged else ""
    if outcome == "running":
        outcome = GONE if _is_gone(record) else RUNNING
    return Recorded(command, outcome, has_ended, saw, models, trouble)


Value = TypeVar("Value")


def _field(
    record: dict[str, Any], name: str, read: Callable[[Any], Value | None], damaged: list[str], *, needed: bool = True
) -> Value | None:
    """A field's value; None where it is not what it should be, and its name then goes to ``damaged``."""
    if name not in record and not needed:
        return None
    value = read(record.get(name))
    if value is None:
        damaged.append(name)
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else None


def _directories(value: Any) -> tuple[str, ...] | None:
    """Of the models; one of which nothing could be written has none."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    return tuple(PurePath(path).name for each in value if isinstance(path := each.get("log_dir"), str))


def _is_gone(record: dict[str, Any]) -> bool:
    """Whether the process ran on this machine and is no more."""
    process = record.get("process")
    if os.name != "posix" or record.get("host") != platform.node() or type(process) is not int or process < 1:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
