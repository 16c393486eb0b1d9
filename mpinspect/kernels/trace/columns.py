"""Events as rows of numbers"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
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


def word(value: Any) -> str:
    """A name: text as it is, a number in digits, "" for anything else, which may be nested deeply."""
    return str(value) if isinstance(value, (str, int)) else ""


#: Microseconds by which a child may outlast its parent. Traces in whole microseconds cut start and duration off one by one; a
#: double holds the time since 1970 to a quarter of one.
_ROUNDING = 1.0


class Nesting:
    """Intervals of many threads. One begins where it starts and is over where it ends: touching ones don't overlap.

    Args:
        intervals: with columns "thread" and "id"; of two that begin and end together the one of smaller id is outside.
        threads: instead of the column, a number for each interval.
        proper: whether intervals of a thread enclose each other or are apart (operators, stack frames), so that overlap is
            a clock's rounding. Ranges that hooks begin and end may overlap.
    """

    def __init__(self, intervals: Columns, threads: Ints | None = None, *, proper: bool = True) -> None:
        self._start, self._end = intervals.start, intervals.end
        self._thread = intervals["thread"] if threads is None else threads
        self._order = np.lexsort((intervals["id"], -self._end, self._start, self._thread))
        self._proper = proper
        #: For each interval the innermost one around its start, or -1. Filled by ``innermost``.
        self.parents: NDArray[np.int64] = np.full(len(intervals), -1)

    def innermost(self, threads: Ints, times: Floats) -> NDArray[np.int64]:
        """For each point (a thread and a time, in any order) the interval that began last of those it is in, or -1."""
        found = np.full(len(times), -1)
        order = np.lexsort((times, threads))
        for intervals, points in self._by_thread(threads, order):
            parents, owners = _sweep(
                self._start[intervals].tolist(), self._end[intervals].tolist(), times[points].tolist(), self._proper
            )
            # From positions within the thread to those in the columns; -1 finds the -1 appended.
            place = np.append(intervals, -1)
            self.parents[intervals] = place[parents]
            found[points] = place[owners]
        return found

    def _by_thread(self, threads: Ints, order: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Intervals and points of each thread that has both, in time's order."""
        own, asked = self._thread[self._order], threads[order]
        for thread in np.intersect1d(own, asked):
            yield (
                self._order[np.searchsorted(own, thread) : np.searchsorted(own, thread, "right")],
                order[np.searchsorted(asked, thread) : np.searchsorted(asked, thread, "right")],
            )


def _sweep(starts: list[float], ends: list[float], points: list[float], proper: bool) -> tuple[list[int], list[int]]:
    """Parents of the intervals and owners of the points, as positions. Everything in time's order."""
    parents, owners, stack = [], [], [-1]
    # The bottom of the stack never ends, and encloses everything.
    ends = [*ends, float("inf")]
    following = iter([*points, float("inf")])
    point = next(following)
    for position, start in enumerate(starts):
        while point < start:
            while ends[stack[-1]] <= point:
                stack.pop()
            owners.append(stack[-1])
            point = next(following)
        end = ends[position]
        while ends[stack[-1]] <= start or (proper and end > ends[stack[-1]] + _ROUNDING):
            stack.pop()
        parents.append(stack[-1])
        stack.append(position)
    while len(owners) < len(points):
        while ends[stack[-1]] <= point:
            stack.pop()
        owners.append(stack[-1])
        point = next(following)
    return parents, owners
