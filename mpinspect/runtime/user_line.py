"""Finds the line of the user's code, however many library frames are in between, and its text; warns there."""

from __future__ import annotations

import linecache
import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from mpinspect.runtime.briefly import first_line_of

#: Packages between the user's code and ours: torch calls our hooks, trainers call torch.
_BETWEEN = (
    "mpinspect",
    "torch",
    "lightning",
    "lightning_utilities",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "contextlib",
)
#: A frame of a traceback's text.
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
#: The time, in seconds since the epoch, from which on a file that changes is no longer the one that runs.
_STARTED = time.time()
#: Most characters of a line's text.
_LONGEST = 120
#: The file of each line that was returned; "" if files of the same name have such a line.
_files: dict[str, str] = {}


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line outside these packages, or at the caller's line without such a line (threads, exit).

    A stacklevel would not do, since it ignores packages, and ``skip_file_prefixes`` needs Python 3.12.
    """
    caller = sys._getframe(1)
    frame = users_frame(caller) or caller
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__") or "sys",
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def innermost_line(frame: FrameType) -> str:
    """Return the user's innermost line above a frame as "train.py:12"; "" without one, as on autograd's threads."""
    users = users_frame(frame)
    if users is None:
        return ""
    return _remembered(users.f_code.co_filename, users.f_lineno)


def _remembered(file: str, number: int) -> str:
    line = f"{Path(file).name}:{number}"
    if _files.setdefault(line, file) != file:
        _files[line] = ""
    return line


def assignment_of(name: str, line: str) -> str:
    """Return the one line that assigns a name, in the file of a line that ``innermost_line`` has returned; "" if not just one."""
    file, assigns = _files.get(line, ""), re.compile(rf"\s*{re.escape(name)}\s*(:[^=]*)?=(?!=)")
    found = [number for number, text in enumerate(linecache.getlines(file), 1) if name in text and assigns.match(text)]
    return _remembered(file, found[0]) if len(found) == 1 else ""


def source_of(line: str) -> str:
    """Return the text of a line that ``innermost_line`` or ``assignment_of`` has returned.

    "" for any other, and if its file can't be read or may have been changed since it was imported.
    """
    file, number = _files.get(line, ""), line.rpartition(":")[2]
    if not file:
        return ""
    # A notebook's cell has text without a file.
    with suppress(OSError):
        if Path(file).stat().st_mtime > _STARTED:
            return ""
    return first_line_of(linecache.getline(file, int(number)), _LONGEST)


def innermost_place(trace: str | None) -> tuple[str, int] | None:
    """Return the file and number of the user's innermost line in a traceback's text."""
    frames = [(file, int(number)) for file, number in _FRAME.findall(trace or "")]
    users = [each for each in frames if not {*Path(each[0]).parts[:-1], Path(each[0]).stem}.intersection(_BETWEEN)]
    return next(reversed(users), None)


def called_at(place: tuple[str, int] | None, function: Callable[[], Any]) -> Any:
    """Call a function from a frame at a line of the user's code."""
    if place is None:
        return function()
    code = _call.__code__.replace(co_filename=place[0], co_firstlineno=place[1] - _CALL_AT)
    return FunctionType(code, {"__name__": "user"})(function)


def _call(function: Callable[[], Any]) -> Any:
    return function()


#: The distance of a function's only line from its first.
_CALL_AT = 1


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code, this one or one above it; None without one."""
    while frame is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    return frame


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code, and not of the interpreter's own that starts a program."""
    return _package(frame) not in _BETWEEN and not frame.f_code.co_filename.startswith("<frozen ")


def _package(frame: FrameType) -> str:
    # With `python -m mpinspect` ``__name__`` is "__main__", but ``__package__`` is still "mpinspect".
    name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or ""
    return str(name).partition(".")[0]
