"""What a launch says, on stderr: stdout is the script's."""

from __future__ import annotations

import contextlib
import sys


def say(sentence: str) -> None:
    """One line of ours. Nobody may be listening: a closed stderr is no fault."""
    write(f"mpinspect: {' '.join(sentence.splitlines())}\n")


def write(text: str) -> None:
    """Text on the stderr that the process was given, wherever the script has turned its own to."""
    stream = sys.__stderr__
    with contextlib.suppress(Exception):
        if stream is not None:
            stream.write(_printable(text, stream.encoding or "ascii"))
            stream.flush()


def _printable(text: str, encoding: str) -> str:
    """A name that the encoding lacks is written escaped instead of ending the report."""
    return text.encode(encoding, "backslashreplace").decode(encoding)
