"""Writes to a terminal or pipe that may lack characters of the text, be closed, or be missing.

Printed text may contain names from files, arguments, models and traces, with any characters. ``say`` escapes
each sentence and ``reporting.escaping`` each report, so that no name breaks a line or controls the terminal.
"""

from __future__ import annotations

import contextlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


def printable(text: str) -> str:
    """Return text on one line, with line ends and control characters escaped as in Python (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(stream: TextIO | None, sentence: object, by: str = "mpinspect") -> None:
    """Write a sentence, escaped by ``printable``, on a line that begins with ``by``. Never raises an Exception."""
    write(stream, f"{by}: {printable(str(sentence))}\n")


def write(stream: TextIO | None, text: str) -> None:
    """Write text and flush; characters that the stream's encoding lacks are escaped. Never raises an Exception."""
    with contextlib.suppress(Exception):
        if stream is not None:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
