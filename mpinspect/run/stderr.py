"""What a launch says, on stderr: stdout is the script's."""

from __future__ import annotations

import sys

from mpinspect.reporting import streams


def say(sentence: str) -> None:
    """One line of ours. Nobody may be listening: a closed stderr is no fault."""
    streams.say(sys.__stderr__, " ".join(sentence.splitlines()))


def write(text: str) -> None:
    """Text on the stderr that the process was given, wherever the script has turned its own to."""
    streams.write(sys.__stderr__, text)
