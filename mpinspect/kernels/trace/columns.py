"""Store events as rows of numbers, a tenth of the size of decoded JSON, and find which interval encloses which."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Upper bound of a valid time in microseconds: a larger number is damage, or an infinity.
LONGEST = 1e18
#: From this number on, float64 cannot represent every integer; identifiers in traces are smaller.
_LARGEST = 1 << 53


class Numbering(dict[Any, int]):
    """Number values from 0 on: equal values get the same ``numbering[value]``; ``list(numbering)`` orders them by number."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


class Columns:
    """A table of float64: start and duration in microseconds, then integers by name; -1 if an event lacks the value.

    ``add((start, duration, *integers))`` appends a row, with the integers in the order of the constructor's names.
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
        # A view of the memory; ``frombuffer`` raises for an empty table.
        rows = np.asarray(self._rows)
        column: Floats = rows.reshape(-1, len(self._places))[:, self._places[name]].copy()
        return column


def number(value: object) -> float | None:
    """Return a profiler's number or numeric string as a float; None if it is neither, too large or NaN."""
    if isinstance(value, (int, float, str)):
        with contextlib.suppress(ValueError, OverflowError):
            if -LONGEST < (found := float(value)) < LONGEST:
                return found
    return None


def integer(value: object, default: int = -1) -> int:
    """Return a profiler's integer or integer string; ``default`` for other values or one too large for an identifier."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return integer(int(value), default)
    return default


def word(value: Any) -> str:
    """Return a value as a name: text unchanged, a number in digits, and "" for other values, which may be deeply nested."""
    return str(value) if isinstance(value, (str, int)) else ""


#: Microseconds that a child may outlast its parent: traces in whole microseconds round start and duration down separately,
#: and a float64 resolves the time since 1970 only to a quarter of a microsecond.
_ROUNDING = 1.0


class Nesting:
    """Find which interval encloses which, on many threads. Intervals are half-open: touching intervals do not overlap.

    Args:
        intervals: the intervals, with columns "thread" and "id"; of two with equal start and end, the one with the smaller id is
            the outer one.
        threads: a number for each interval, used instead of the column "thread".
        proper: whether intervals of a thread either enclose each other or are disjoint (operators, stack frames), so that
            overlap is caused by clock rounding. Ranges opened and closed by hooks may overlap.
    """

    def __init__(self, intervals: Columns, threads: Ints | None = None, *, proper: bool = True) -> None:
        self._start, self._end = intervals.start, intervals.end
        self._thread = intervals["thread"] if threads is None else threads
        self._order = np.lexsort((intervals["id"], -self._end, self._start, self._thread))
        self._proper = proper
        #: For each interval, the innermost interval around its start, or -1. Filled by ``innermost``.
        self.parents: NDArray[np.int64] = np.full(len(intervals), -1)

    def innermost(self, threads: Ints, times: Floats) -> NDArray[np.int64]:
        """Return, for each point (a thread and a time, in any order), the enclosing interval that began last, or -1."""
        found = np.full(len(times), -1)
        order = np.lexsort((times, threads))
        for intervals, points in self._by_thread(threads, order):
            parents, owners = _sweep(
                self._start[intervals].tolist(), self._end[intervals].tolist(), times[points].tolist(), self._proper
            )
            # Maps positions within the thread to positions in the columns; -1 selects the appended -1.
            place = np.append(intervals, -1)
            self.parents[intervals] = place[parents]
            found[points] = place[owners]
        return found

    def _by_thread(self, threads: Ints, order: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Yield the intervals and points of each thread that has both, in order of time."""
        own, asked = self._thread[self._order], threads[order]
        for thread in np.intersect1d(own, asked):
            yield (
                self._order[np.searchsorted(own, thread) : np.searchsorted(own, thread, "right")],
                order[np.searchsorted(asked, thread) : np.searchsorted(asked, thread, "right")],
            )


def _sweep(starts: list[float], ends: list[float], points: list[float], proper: bool) -> tuple[list[int], list[int]]:
    """Return the intervals' parents and the points' owners, as positions. All arguments are in order of time."""
    parents, owners, stack = [], [], [-1]
    # The bottom of the stack never ends and encloses everything.
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
