"""Finds a number that the loop keeps from step to step and that stays infinite or NaN, such as the running mean of a norm.

One infinity, as of a step that a scaler skips, stays in a running mean for good: every later mean is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import StuckNumber
from mpinspect.runtime.outputs import leaves
from mpinspect.runtime.storages import StorageReference, has_storage, storage_key
from mpinspect.runtime.user_line import innermost_line

_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})


class _Kept(NamedTuple):
    """A number that stays broken, and its record."""

    number: StorageReference
    record: StuckNumber


class StuckNumbers:
    """Follows numbers from before the step that are infinite or NaN into the numbers that the step computes from them.

    A tensor's constants, such as a mask's -inf, are no numbers, and a minimum that begins at infinity ends with the first loss.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        #: By storage made in this step: whether its number follows from a broken one from before the step.
        self._made: Marks[tuple[bool]] = Marks()
        self._kept: list[_Kept] = []
        self._is_compared = False

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: FrameType) -> None:
        """Follow an operator of the loop's own code or of a forward; ``frame`` is its caller's. Waits for the device."""
        operands = _tensors((*args, *kwargs.values()))
        keys = {storage_key(each) for each in operands}
        numbers = [each for each in operands if _is_number(each)]
        for value in _tensors([result]):
            is_new = storage_key(value) not in keys
            if is_new or func._schema.is_mutable:
                is_stuck = len(numbers) == len(operands) and self._is_stuck(value, numbers, is_new)
                if is_stuck:
                    names = (func.overloadpacket.__name__, innermost_line(frame), "forward")
                    is_nan, dtype = math.isnan(float(value.detach())), dtype_name(value.dtype)
                    record = StuckNumber(name=self._module(), names=names, text=dtype, is_nan=is_nan)
                    self._kept.append(_Kept(StorageReference(value), record))
                if is_new:
                    self._made.put(value, (is_stuck,))
        if func.overloadpacket.__name__ in _COMPARISONS and any(self._is_from_before(each) for each in numbers):
            self._is_compared = True

    def records(self) -> list[StuckNumber]:
        """Return the record of the last number that stays broken and still exists; to be called when the step has ended."""
        kept = [each.record for each in self._kept if not each.number.expired()]
        return kept[-1:] if self._is_compared else []

    def _is_stuck(self, value: torch.Tensor, numbers: list[torch.Tensor], is_new: bool) -> bool:
        """Return whether a number is broken because of one from before the step, and of nothing else."""
        if not _is_number(value) or _is_finite(value):
            return False
        others = [each for each in numbers if each is not value]
        broken = [each for each in others if not _is_finite(each)]
        if not is_new and not broken:
            # Written in place: only its former value can have been broken.
            return self._made.of(value) in (None, (True,))
        return bool(broken) and all(map(self._is_from_before, broken))

    def _is_from_before(self, number: torch.Tensor) -> bool:
        """Return whether a broken number is older than the step, or follows from such a one."""
        return not _is_finite(number) and self._made.of(number) in (None, (True,))


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in leaves(given) if isinstance(each, torch.Tensor) and has_storage(each)]


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and is_plain(tensor)


def _is_finite(number: torch.Tensor) -> bool:
    return math.isfinite(float(number.detach()))
