"""Which interval is innermost at a point of a thread, and which interval encloses which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpinspect.kernels.trace.columns import Columns, Floats, Ints

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
