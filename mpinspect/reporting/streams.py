"""Writing to a terminal or pipe that may lack a layer's name, be closed, or not be there at all.

What is printed may hold names of files, arguments, models and traces, in which anything may stand. Each sentence goes out by
``say``, each report by way of ``reports.escaping``: nothing in them ends a line or steers a terminal.
"""

from __future__ import annotations

import contextlib
from typing import TextIO


def printable(text: str) -> str:
    """Text on one line, in which no character steers a terminal: such characters as Python writes them (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(stream: TextIO | None, sentence: object, by: str = "mpinspect") -> None:
    """Write a sentence of ours, printable, on a line that says who says it. Never raises an Exception, as ``write``."""
    write(stream, f"{by}: {printable(str(sentence))}\n")


def write(stream: TextIO | None, text: str) -> None:
    """Write text, what the stream's encoding lacks escaped, and flush. Never raises an Exception: nobody may be listening."""
    with contextlib.suppress(Exception):
        if stream is not None:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
