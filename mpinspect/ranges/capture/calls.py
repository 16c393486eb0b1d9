"""The calls of a step: the tensors that each module received and returned. Every tensor has a number within the step.

Each call only records numbers; the producers and consumers of each tensor are computed only if a value is not finite.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge

from mpinspect.ranges.capture.culprit import CallRecord, TensorStory
from mpinspect.ranges.capture.largest import version_of

#: A tensor new in this step, its number, and whether it is a module's input that no observed module produced.
Fresh = tuple[torch.Tensor, int, bool]


class StepCalls:
    """Stores the calls of one step, with tensors as numbers. Holds no tensor."""

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        #: The fields of calls; and pairs of a module with a full backward hook and the number of the input wrapped for it.
        self._log: list[tuple[str, list[int], list[int], bool] | tuple[str, int]] = []
        #: Numbers of the tensors that already had another hook before ours; numbers of the tensors where a backward began.
        self._altered: set[int] = set()
        self._roots: set[int] = set()
        #: The model's outputs by the sequence number of their autograd node, and their place among its results.
        self._ends: dict[tuple[int, int], int] = {}

    def called(self, module: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[Fresh]:
        """Record a module's forward; return the tensors that are new in this step, inputs first."""
        fresh: list[Fresh] = []
        given, returned, overwritten = [], [], False
        changed: list[int] = []
        for tensor in inputs:
            if not tensor.numel():
                continue
            version = version_of(tensor)
            if version and any(tensor is output for output in outputs):
                # The module changed this input in place and returned it: the tensor is the output by now.
                before = self._before_change(tensor)
                if before is None:
                    overwritten = True
                else:
                    changed.append(before)
                continue
            number = self._number(tensor, version)
            if number is None:
                number = self._tell_apart(tensor, version)
                fresh.append((tensor, number, True))
            given.append(number)
        for tensor in outputs:
            if not tensor.numel():
                continue
            version = version_of(tensor)
            # Most outputs are new: looking up their id spares the call.
            number = self._number(tensor, version) if id(tensor) in self._known else None
            if number is None:
                number = self._tell_apart(tensor, version)
                hooks = tensor._backward_hooks
                # The tensor already has another hook, whose return value replaces the gradient before our hook receives it.
                if hooks and any(map(_may_alter, hooks.values())):
                    self._altered.add(number)
                fresh.append((tensor, number, False))
            returned.append(number)
            if not module and tensor.grad_fn is not None:
                self._ends[tensor.grad_fn._sequence_nr(), tensor.output_nr] = number
        self._log.append((module, given + changed, returned, overwritten))
        return fresh

    def _before_change(self, tensor: torch.Tensor) -> int | None:
        """Return a tensor's last recorded number if it has been changed in place at most once since; None otherwise."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or version_of(tensor) - known[1] > 1:
            return None
        return known[2]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return a tensor's number if the tensor was recorded in this step and is unchanged since; None otherwise."""
        return self._number(tensor, version_of(tensor))

    def _number(self, tensor: torch.Tensor, version: int) -> int | None:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version:
            return None
        return known[2]

    def unseen(self) -> int:
        """Return a new number for a tensor that can't be accessed: the one inside a wrapper."""
        number, self._count = self._count, self._count + 1
        return number

    def wrapped(self, number: int, module: str) -> None:
        """Record that a full backward hook wrapped tensor ``number`` before ``module`` received it.

        The module becomes the tensor's consumer in place of its submodules, which only received the wrapped tensor.
        """
        if 0 <= number < self._count:
            self._log.append((module, number))

    def backward_called(self, tensors: Iterable[torch.Tensor], edges: Iterable[GradientEdge] = ()) -> None:
        """Record that a backward begins at these tensors, or at edges of the model's outputs, which may be gone."""
        found = {self.number_of(tensor) for tensor in tensors}
        found.update(self._ends.get((edge.node._sequence_nr(), edge.output_nr)) for edge in edges)
        self._roots.update(number for number in found if number is not None)

    def forget_tensors(self) -> None:
        """Forget the numbers of all tensors, at the end of the step."""
        self._known.clear()

    def stories(self) -> tuple[list[TensorStory], list[CallRecord]]:
        """Return each tensor's producers and consumers, by number, and the calls in the order of their returns."""
        stories = [
            TensorStory(altered=number in self._altered, root=number in self._roots) for number in range(self._count)
        ]
        calls = []
        for entry in self._log:
            module = entry[0]
            if len(entry) == 2:
                consumers = stories[entry[1]].consumers
                consumers[:] = [other for other in consumers if module and not other.startswith(module + ".")]
                consumers.append(module)
                continue
            call = CallRecord(*entry)
            calls.append(call)
            for number in call.given:
                # A module that returns its input unchanged does not consume it.
                if number not in call.returned:
                    stories[number].consumers.append(module)
            for number in call.returned:
                stories[number].producers.append(module)
        return stories, calls

    def _tell_apart(self, tensor: torch.Tensor, version: int) -> int:
        number, self._count = self._count, self._count + 1
        # A weak reference shows whether the tensor still exists: Python reuses the ids of deleted objects.
        self._known[id(tensor)] = (weakref.ref(tensor), version, number)
        return number


def _may_alter(hook: object) -> bool:
    """Return whether a hook may change the gradient; the hooks of torch's FSDP2 only gather the weights."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
