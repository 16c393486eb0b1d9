"""How a script ended, in words and as an exit status."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Args:
        words: "ended", "exit status 3", "RuntimeError: ...", "stopped by Ctrl-C".
        status: the exit status; None where a signal ends the process, or another program has taken its place.
        by_error: whether an exception ended it that nothing caught.
    """

    words: str = "ended"
    status: int | None = 0
    by_error: bool = False


#: Of a message's characters that are quoted.
_LONGEST = 200
#: The process then dies by the signal.
STOPPED = Outcome("stopped by Ctrl-C", None)


def outcome_of(error: BaseException) -> Outcome:
    """What Python makes of an exception that nothing catches."""
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    if not isinstance(error, SystemExit):
        return Outcome(brief(error), 1, by_error=True)
    code = error.code
    if code is None or isinstance(code, int):
        # The system keeps eight bits.
        status = (code or 0) & 0xFF
        return Outcome(f"exit status {status}", status) if status else Outcome()
    return Outcome(f"exit status 1: {_first_line(code)}", 1)


def brief(error: BaseException) -> str:
    """An exception in a line: its type, and the first line of its message."""
    text = _first_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_line(what: object) -> str:
    try:
        text = next(filter(None, (" ".join(line.split()) for line in str(what).splitlines())), "")
    except Exception:
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
