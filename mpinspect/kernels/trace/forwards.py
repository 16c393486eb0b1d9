"""Find the forward operator whose gradient a backward operator computes.

The profiler gives one sequence number to the operator that makes an autograd node and to the node's run in the backward
(torch/csrc/profiler/collection.cpp, torch/csrc/autograd/profiler_kineto.cpp). An operator gets the number of its thread's next
node, so earlier operators that make no node, and operators around the maker, share the maker's number. Of all operators with
one number, the maker began last. Each thread counts separately. Without sequence numbers, Kineto's arrows from forward to
backward (category fwdbwd) connect the two.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from mpinspect.kernels.trace.columns import Nesting
from mpinspect.kernels.trace.recording import Recording

_Key = tuple[object, int]


class Forwards:
    """Find the forward operators of one trace.

    Args:
        recording: the trace's events.
        nesting: the nesting of the recording's operators.
    """

    def __init__(self, recording: Recording, nesting: Nesting) -> None:
        operators = recording.operators
        self._pids = [thread[0] for thread in recording.threads]
        self._thread = operators["thread"]
        self._sequence = operators["sequence"]
        self._forward_thread = operators["forward_thread"]
        self._is_numbered: list[bool] = ((self._forward_thread > 0) & (self._sequence >= 0)).tolist()
        self._by_arrow = _arrows(recording, nesting)
        self._makers = self._find_makers(operators.start, operators["id"])
        self._threads = self._learn_threads()

    def of(self, operator: int) -> int:
        """Return the forward operator of a backward operator, or -1. Both are positions in the recording."""
        if (arrow := self._by_arrow.get(operator)) is not None:
            return arrow
        if not self.is_backward(operator):
            return -1
        makers = self._makers.get(self._key(operator), {})
        if len(makers) == 1:
            return next(iter(makers.values()))
        return makers.get(self._threads.get((self._pid(operator), int(self._forward_thread[operator])), -1), -1)

    def is_backward(self, operator: int) -> bool:
        """Return whether the trace identifies the autograd node that the operator runs."""
        return self._is_numbered[operator] or operator in self._by_arrow

    def _pid(self, operator: int) -> object:
        return self._pids[self._thread[operator]]

    def _key(self, operator: int) -> _Key:
        return self._pid(operator), int(self._sequence[operator])

    def _find_makers(self, start: NDArray[np.float64], identity: NDArray[np.int64]) -> dict[_Key, dict[int, int]]:
        """Return the last-started operator for each sequence number, by (process, number) and then by thread."""
        makers: dict[_Key, dict[int, int]] = {}
        forward = np.flatnonzero((self._sequence >= 0) & (self._forward_thread <= 0))
        for operator in forward[np.lexsort((identity[forward], start[forward]))].tolist():
            makers.setdefault(self._key(operator), {})[int(self._thread[operator])] = operator
        return makers

    def _learn_threads(self) -> dict[tuple[object, int], int]:
        """Return threads by (process, "Fwd thread id"); the profiler counts these ids from 1 and uses them only there."""
        votes: dict[tuple[object, int], Counter[int]] = {}
        for operator in np.flatnonzero((self._sequence >= 0) & (self._forward_thread > 0)).tolist():
            threads = [*self._makers.get(self._key(operator), {})]
            if (arrow := self._by_arrow.get(operator)) is not None:
                threads = [int(self._thread[arrow])]
            if len(threads) == 1:
                key = (self._pid(operator), int(self._forward_thread[operator]))
                votes.setdefault(key, Counter())[threads[0]] += 1
        return {key: counted.most_common(1)[0][0] for key, counted in votes.items()}


def _arrows(recording: Recording, nesting: Nesting) -> dict[int, int]:
    """Return a map from the operator at each arrow's head to the operator at its tail."""
    tails, heads = recording.flow_starts, recording.flow_ends
    if not len(tails) or not len(heads):
        return {}
    at_tail = nesting.innermost(tails["thread"], tails.start)
    at_head = nesting.innermost(heads["thread"], heads.start)
    tail_of = dict(zip(tails["id"].tolist(), at_tail.tolist(), strict=True))
    links = {
        head: tail_of[flow]
        for flow, head in zip(heads["id"].tolist(), at_head.tolist(), strict=True)
        if flow in tail_of
    }
    return {head: tail for head, tail in links.items() if head >= 0 and tail >= 0}
