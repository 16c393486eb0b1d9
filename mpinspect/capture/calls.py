"""The calls of a step: which module was given, and returned, which tensor. Every tensor has a number within the step.

What that says of each tensor is only worked out where something broke: what every call leaves here are numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from mpinspect.capture.culprit import TensorStory

#: A tensor not seen before in this step, its number, and whether it was given to a module, made by none that was seen.
Fresh = tuple[torch.Tensor, int, bool]


class StepCalls:
    """What was called in one step. Holds no tensor."""

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: Module, the numbers that it was given and those that it returned; or module and the one wrapped for it.
        self._log: list[tuple[str, list[int], list[int]] | tuple[str, int]] = []
        #: Somebody else's hook was on these before ours.
        self._altered: set[int] = set()

    def called(
        self, module: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[Fresh], list[int]]:
        """A module's forward ran: the tensors not seen before, and the numbers of all inputs but those changed in place."""
        fresh, given, returned = [], [], []
        made = [id(tensor) for tensor in outputs]
        for tensor in inputs:
            # Changed in place it is the output by now.
            if id(tensor) in made or not tensor.numel():
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
        self._log.append((module, given, returned))
        return fresh, given

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor seen before in this step, unchanged since; None otherwise."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def unseen(self) -> int:
        """A number for a tensor that is not at hand: the one inside a wrapper."""
        number, self._count = self._count, self._count + 1
        return number

    def wrapped(self, number: int, module: str) -> None:
        """Tensor ``number`` is what a full backward hook's wrapper was put around before ``module`` got it.

        The parts of the module that were handed the wrapped tensor on are not its consumers: the wrapper is the module's.
        """
        if 0 <= number < self._count:
            self._log.append((module, number))

    def forget_tensors(self) -> None:
        """The step is over: the next one's tensors are others."""
        self._known.clear()

    def stories(self) -> tuple[list[TensorStory], dict[str, set[int]]]:
        """Of every tensor, by its number, where it came from and went; and by module the numbers that it was given."""
        stories = [TensorStory(altered=number in self._altered) for number in range(self._count)]
        inputs: dict[str, set[int]] = {}
        for entry in self._log:
            module = entry[0]
            if len(entry) == 2:
                consumers = stories[entry[1]].consumers
                consumers[:] = [other for other in consumers if module and not other.startswith(module + ".")]
                consumers.append(module)
                continue
            for number in entry[1]:
                stories[number].consumers.append(module)
                inputs.setdefault(module, set()).add(number)
            for number in entry[2]:
                stories[number].producers.append(module)
        return stories, inputs

    def _tell_apart(self, tensor: torch.Tensor) -> int:
        number, self._count = self._count, self._count + 1
        # A weak reference: ids are used again once a tensor is gone.
        self._known[id(tensor)] = (weakref.ref(tensor), _version(tensor), number)
        return number


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; inference tensors do not count it."""
    return -1 if tensor.is_inference() else tensor._version
