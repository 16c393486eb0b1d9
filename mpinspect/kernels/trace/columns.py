"""Events as rows of numbers: a tenth of what the decoded JSON takes, and ready for NumPy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Microseconds that no clock shows: a number beyond is damage, or an infinity.
LONGEST = 1e18
#: Integers beyond are not exact in a float64; no identifier of a trace is.
_LARGEST = 1 << 53


class Numbering(dict[Any, int]):
    """``numbering[value]``: equal values get equal numbers, from 0 on. ``list(numbering)``: the values by number."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


class Columns:
    """A table of float64: start and duration in microseconds, then integers (-1: not there) by name.

    ``add((start, duration, *integers))`` appends a row, integers in the order of the constructor's names.
    """

    def __init__(self, *integers: str) -> None:
        self._rows = array("d")
        self._places = {name: place for place, name in enumerate(("start", "duration", *integers))}
        self.add = self._rows.extend

    def __len__(self) -> int:
        return len(self._rows) // len(self._places)

    @property
    def start(self) -> Floats:
        return self._column("start")

    @property
    def duration(self) -> Floats:
        return self._column("duration")

    @property
    def end(self) -> Floats:
        return self.start + self.duration

    def __getitem__(self, name: str) -> Ints:
        return self._column(name).astype(np.int64)

    def _column(self, name: str) -> Floats:
        rows = np.frombuffer(self._rows) if self._rows else np.empty(0)
        column: Floats = rows.reshape(-1, len(self._places))[:, self._places[name]].copy()
        return column


def number(value: object) -> float | None:
    """A float of what a profiler wrote as a number or as a string; None if it is neither, or too large, or NaN."""
    if isinstance(value, (int, float, str)):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            return None
        return found if -LONGEST < found < LONGEST else None
    return None


def integer(value: object, default: int = -1) -> int:
    """An integer of what a profiler wrote; ``default`` if it is none, or too large to be one of a trace's identifiers."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    if isinstance(value, str):
        try:
            return integer(int(value), default)
        except ValueError:
            return default
    return default
