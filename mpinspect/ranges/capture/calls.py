"""The calls of a step: which module was given, and returned, which tensor. Every tensor has a number within the step.

What that says of each tensor is only worked out where something broke: what every call leaves here are numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from mpinspect.ranges.capture.culprit import Call, TensorStory

#: A tensor not seen before in this step, its number, and whether it was given to a module, made by none that was seen.
Fresh = tuple[torch.Tensor, int, bool]


class StepCalls:
    """Keeps what was called in one step, as numbers. Holds no tensor."""

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: Calls, and the modules for which a tensor was wrapped, with its number.
        self._log: list[Call | tuple[str, int]] = []
        #: Somebody else's hook was on these before ours.
        self._altered: set[int] = set()

    def called(self, module: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[Fresh]:
        """Note that a module's forward ran. Returns the tensors not seen before, inputs first."""
        fresh, given, returned = [], [], []
        changed: list[int] = []
        overwritten = False
        made = [id(tensor) for tensor in outputs]
        for tensor in inputs:
            if not tensor.numel():
                continue
            if id(tensor) in made and _version(tensor):
                # Changed in place it is the output by now.
                before = self._before_change(tensor)
                if before is None:
                    overwritten = True
                else:
                    changed.append(before)
                continue
            number = self.number_of(tensor)
            if number is None:
                number = self._tell_apart(tensor)
                fresh.append((tensor, number, True))
            given.append(number)
        for tensor in outputs:
            if not tensor.numel():
                continue
            number = self.number_of(tensor)
            if number is None:
                number = self._tell_apart(tensor)
                # Another hook on it already: what that returns replaces the gradient before we see it.
                if getattr(tensor, "_backward_hooks", None):
                    self._altered.add(number)
                fresh.append((tensor, number, False))
            returned.append(number)
        self._log.append(Call(module, given + changed, returned, overwritten))
        return fresh

    def _before_change(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor as it was seen last, if it was changed in place once since at most; None otherwise."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or _version(tensor) - known[1] > 1:
            return None
        return known[2]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor seen before in this step, unchanged since; None otherwise."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def unseen(self) -> int:
        """Return a number for a tensor that is not at hand: the one inside a wrapper."""
        number, self._count = self._count, self._count + 1
        return number

    def wrapped(self, number: int, module: str) -> None:
        """Note that a full backward hook's wrapper was put around tensor ``number`` before ``module`` got it.

        The parts of the module that were handed the wrapped tensor on are not its consumers: the wrapper is the module's.
        """
        if 0 <= number < self._count:
            self._log.append((module, number))

    def forget_tensors(self) -> None:
        """Forget which tensors have which numbers: the step is over."""
        self._known.clear()

    def stories(self) -> tuple[list[TensorStory], list[Call]]:
        """Return by number where each tensor came from and went; and the calls, in the order in which they returned."""
        stories = [TensorStory(altered=number in self._altered) for number in range(self._count)]
        calls = []
        for entry in self._log:
            module = entry[0]
            if not isinstance(entry, Call):
                consumers = stories[entry[1]].consumers
                consumers[:] = [other for other in consumers if module and not other.startswith(module + ".")]
                consumers.append(module)
                continue
            calls.append(entry)
            for number in entry.given:
                # What it handed on as it was it did nothing to.
                if number not in entry.returned:
                    stories[number].consumers.append(module)
            for number in entry.returned:
                stories[number].producers.append(module)
        return stories, calls

    def _tell_apart(self, tensor: torch.Tensor) -> int:
        number, self._count = self._count, self._count + 1
        # A weak reference: ids are used again once a tensor is gone.
        self._known[id(tensor)] = (weakref.ref(tensor), _version(tensor), number)
        return number


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place; inference tensors do not count it."""
    return -1 if tensor.is_inference() else tensor._version
