"""Describes an exception, or any object, in one line. Imports no torch."""

from __future__ import annotations

#: Most characters quoted of an exception's message.
_LONGEST = 200


def brief(error: BaseException) -> str:
    """Return one line that describes an exception: its type and the first line of its message."""
    return f"{type(error).__name__}: {first_line_of(error)}".removesuffix(": ")


def first_line_of(given: object, longest: int = _LONGEST) -> str:
    """Return the first non-blank line of an object's text, cut after ``longest`` characters; "" if the text is blank."""
    try:
        text = next(filter(None, (" ".join(line.split()) for line in str(given).splitlines())), "")
    except Exception:
        return ""
    if len(text) > longest:
        text = f"{text[:longest]}..."
    return text
