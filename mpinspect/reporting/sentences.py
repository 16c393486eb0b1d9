"""Sentences as data: every text that a finding can print, whole, with names in braces for the figures.

A format specification in a sentence is one of Python's, or one of these words: "percent" (a share), "scale" (a loss scale as
``with_power`` writes it), "power" (``as_power``), "factor" (``number_or_power``), "format" (a dtype), "some" or "some 3" (names),
"count THING" (a number of things). So ``{lost:percent} of {names:some 3}`` is a sentence that can be read as it is printed.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from mpinspect.reporting.words import (
    as_power,
    format_name,
    number_of,
    number_or_power,
    percent,
    some,
    with_power,
)


class Sentences(Enum):
    """Base of enumerations of sentences; the members of one belong to one finding."""

    def when(self: _S, condition: object) -> _S | None:
        """Return the sentence if the condition holds, else None, which prints nothing."""
        return self if condition else None


_S = TypeVar("_S", bound=Sentences)

#: One sentence, several, or none; each None among them is skipped.
Said: TypeAlias = Sentences | Iterable[Sentences | None] | None


_WORDS: dict[str, Callable[[Any], str]] = {
    "percent": percent,
    "scale": with_power,
    "power": as_power,
    "factor": number_or_power,
    "format": format_name,
}


class _Formatter(string.Formatter):
    """Knows the format specifications of this module as well."""

    def format_field(self, value: Any, format_spec: str) -> str:
        word, _, rest = format_spec.partition(" ")
        if word in _WORDS:
            return _WORDS[word](value)
        if word == "some":
            return some(list(value), *map(int, rest.split()))
        if word == "count":
            return number_of(value, rest)
        return str(super().format_field(value, format_spec))


_FORMATTER = _Formatter()


def text(said: Said, figures: Mapping[str, Any], between: str = " ") -> str:
    """Return sentences with their figures filled in.

    Args:
        said: one sentence, several, or none.
        figures: a value for every name in their braces.
        between: stands between two sentences.

    Raises:
        KeyError: a figure is missing.
    """
    members = (said,) if isinstance(said, Sentences) else said or ()
    return between.join(_FORMATTER.vformat(each.value, (), figures) for each in members if each is not None)
