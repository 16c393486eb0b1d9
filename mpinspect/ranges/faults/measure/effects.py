"""Weighs the errors of operators by the gradient of the loss at their results, in a step that is computed twice, and finds the
weights whose gradients they reach."""

from __future__ import annotations

from typing import Any

import torch

from mpinspect.ranges.capture.graph import walk
from mpinspect.ranges.faults.measure.operands import numbers_of
from mpinspect.ranges.records import Record

#: Bytes of errors that are held until the gradient at their operator's result is known.
_MOST_ERRORS = 64 << 20
#: The most nodes of a graph that are searched for the weights.
_MOST_NODES = 1 << 14


class Effects:
    """Holds errors of results until the backward of their operator runs."""

    def __init__(self) -> None:
        #: The errors of operators whose backward has not run, by the sequence number of their autograd node.
        self._errors: dict[int, torch.Tensor] = {}
        #: The bytes of errors that were held so far.
        self._bytes = 0
        #: The norms of (error times gradient of the loss) by sequence number, and the sequence number by the record's id.
        self._norms: dict[int, float] = {}
        self._nodes: dict[int, int] = {}
        #: The nodes whose backward has run, by sequence number.
        self._ran: dict[int, Any] = {}

    def add(self, record: Record, node: int, off: torch.Tensor) -> None:
        """Hold the error ``off`` of a recorded operator's result, unless those before it have used up the memory."""
        if self._bytes + off.nbytes <= _MOST_ERRORS:
            self._errors[node] = off
            self._bytes += off.nbytes
            self._nodes[id(record)] = node

    def weigh(self, args: tuple[Any, ...]) -> None:
        """Multiply the error of an operator, whose backward is running, by the gradient of the loss at its result."""
        node = torch._C._current_autograd_node() if self._errors else None
        if node is None:
            return
        for each in (node, *(each for each, _ in node.next_functions if each is not None)):
            # A difference's own node runs no operator.
            number = each._sequence_nr()
            if number in self._errors:
                self._ran.setdefault(number, each)
        number = node._sequence_nr()
        error = self._errors.get(number)
        if error is None:
            return
        gradient = next((each for each in numbers_of(args) if each.shape == error.shape), None)
        if gradient is not None:
            del self._errors[number]
            self._norms[number] = float((gradient.float() * error).norm())

    def of(self, record: Record) -> float | None:
        """Return how much a record's error changes the loss, to first order; None if that is unknown."""
        return self._norms.get(self._nodes.get(id(record), -1))

    def reached(self, record: Record) -> set[int]:
        """Return the ids of the tensors whose gradients a record's error may change, without those after it; empty if unknown."""
        node = self._ran.get(self._nodes.get(id(record), -1))
        leaves = (getattr(each, "variable", None) for each in walk([node], _MOST_NODES))
        return {id(each) for each in leaves if each is not None}

    def clear(self) -> None:
        """Free the errors whose backward has not run."""
        self._errors.clear()
        self._ran.clear()
