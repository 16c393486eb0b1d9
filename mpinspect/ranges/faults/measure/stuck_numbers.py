"""Finds a number that the loop keeps from step to step and that stays infinite or NaN, such as the running mean of a norm.

One infinity, as of a step that a scaler skips, stays in a running mean for good: every later mean is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import OperatorCall, is_in_forward
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import StuckNumber
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import StorageReference, has_storage, storage_key
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

_COMPARISONS = frozenset({aten.gt, aten.ge, aten.lt, aten.le})
#: Operators in place after which a number that is not finite was not finite before either, if their operands are.
_ARITHMETIC = frozenset({aten.add_, aten.sub_, aten.mul_, aten.div_, aten.lerp_, aten.addcmul_})
#: Operators that make a tensor of the script's own number, and have it as their argument.
_CONSTANTS = frozenset({aten.lift_fresh, aten.lift_fresh_copy})


class _Kept(NamedTuple):
    """A number that stays broken, and its record."""

    number: StorageReference
    record: StuckNumber


class StuckNumbers:
    """Follows numbers from before the step that are infinite or NaN into the numbers that the step computes from them.

    Only tensors of one element are followed: a mask has infinities on purpose. A minimum that begins at infinity is not reported,
    since the first loss ends it.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        #: By storage made in this step: whether its number follows from a broken one from before the step.
        self._made: Marks[bool] = Marks()
        self._kept: list[_Kept] = []
        self._is_compared = False

    def ran(self, call: OperatorCall) -> None:
        """Follow an operator. Waits for the device."""
        func, args, kwargs, result, frame, in_optimizer = call
        operator, results = func.overloadpacket, _tensors([result])
        # Gradients and updates are of this step.
        if in_optimizer or not is_in_forward() or operator in _CONSTANTS:
            for value in results:
                self._made.put(value, False)
            return
        operands = _tensors((*args, *kwargs.values()))
        keys = {storage_key(each) for each in operands}
        numbers = [each for each in operands if _is_number(each)]
        for value in results:
            is_new, is_stuck = storage_key(value) not in keys, False
            if len(numbers) == len(operands) and _is_number(value) and (is_new or func._schema.is_mutable):
                is_stuck = self._is_stuck(value, numbers, is_new or operator not in _ARITHMETIC)
                self._forget(value)
            if is_stuck:
                names = (operator.__name__, innermost_line(frame), "forward")
                is_nan, dtype = math.isnan(float(value.detach())), dtype_name(value.dtype)
                record = StuckNumber(name=self._module(), names=names, text=dtype, is_nan=is_nan)
                self._kept.append(_Kept(StorageReference(value), record))
            if is_new:
                self._made.put(value, is_stuck)
        if operator in _COMPARISONS and any(map(self._is_from_before, numbers)):
            self._is_compared = True

    def records(self) -> list[StuckNumber]:
        """Return the record of the last number that stays broken and still exists; to be called when the step has ended."""
        kept = [each.record for each in self._kept if not each.number.expired()]
        return [replace(each, is_compared=self._is_compared) for each in kept[-1:]]

    def _forget(self, value: torch.Tensor) -> None:
        """Forget what was recorded of a number that is written."""
        self._kept = [each for each in self._kept if each.number.key != storage_key(value)]

    def _is_stuck(self, value: torch.Tensor, numbers: list[torch.Tensor], is_made_of_others: bool) -> bool:
        """Return whether a number is broken because of one from before the step, and of nothing else."""
        if _is_finite(value):
            return False
        broken = [each for each in numbers if each is not value and not _is_finite(each)]
        if not is_made_of_others and not broken:
            # Only its former value can have been broken.
            return self._made.of(value) is not False
        return bool(broken) and all(map(self._is_from_before, broken))

    def _is_from_before(self, number: torch.Tensor) -> bool:
        """Return whether a number is broken and older than the step, or follows from such a one."""
        return self._made.of(number) is not False and not _is_finite(number)


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in leaves(given) if isinstance(each, torch.Tensor) and has_storage(each)]


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and is_plain(tensor)


def _is_finite(number: torch.Tensor) -> bool:
    return math.isfinite(float(number.detach()))
