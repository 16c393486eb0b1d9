"""Finds additions whose smaller operand is absorbed by the larger one, in a step that is computed twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpinspect.ranges.faults.measure.kept_sums import KeptSums
from mpinspect.ranges.faults.measure.operands import Pending, summands
from mpinspect.ranges.records import AbsorbedOperand

#: The part of a sum from which on rounding can't take half of an operand, by 4.
_LEAST_KEPT = 2.0**-6
#: The least part of the smaller operand that an addition loses, of its norm.
_ABSORBED = 0.5
#: The least relative error of a running sum: the rounding of terms that are not lost makes far less.
_SUM_OFF = 0.1
#: The least number of elements of an addition that is judged alone: a few may be absorbed by chance.
_FEWEST = 64


class Additions:
    """Judges the additions of a forward; those of few elements by all additions at their line.

    Args:
        kept: the tensors that persist from step to step, whose changes in place it judges itself.
    """

    def __init__(self, kept: KeptSums) -> None:
        self._kept = kept
        #: Additions of few elements, by line: each alone may be absorbed by chance. Each has the relative error of its result.
        self._repeated: defaultdict[str, list[tuple[AbsorbedOperand, float]]] = defaultdict(list)

    def judge(
        self,
        pending: Pending,
        value: torch.Tensor,
        local: Callable[[], torch.Tensor],
        inherited: Callable[[], float],
        describe: Callable[..., AbsorbedOperand],
    ) -> tuple[AbsorbedOperand, torch.Tensor] | None:
        """Return the record of an addition that loses most of an operand, and the error of its result. Waits for the device.

        Args:
            value: the addition's result in 16 bits.
            local: returns the exact sum of the operands as they are, in FP32.
            inherited: returns the relative error of the result.
            describe: makes a record of a class at this line, with figures.
        """
        is_in_place = pending.func._schema.is_mutable
        given = pending.given[0][:2]
        if is_in_place and pending.node is None and self._kept.keeps(given[0]):
            return None
        # Of a result that is no tensor of the script's own yet, a few elements are worth a look.
        is_kept = pending.node is None and value.numel() < _FEWEST and any(map(self._kept.keeps, given))
        if not (is_in_place or is_kept) and (not _are_alike(given, value) or _are_comparable(pending, value)):
            # A small number, as against a division by zero, may be lost; a running sum in place may not.
            return None
        operands = summands(pending, local())
        if is_kept and not is_in_place and len(operands) == 2:
            by_size = sorted(zip(operands, given, strict=True), key=lambda each: float(each[0].abs().max()))
            if self._kept.keeps(by_size[1][1]):
                self._kept.added(value, by_size[1][0], by_size[0][0], describe)
        if not _are_alike(operands, value):
            return None
        off = value.float() - local()
        least, error = min(float(each.norm()) for each in operands), float(off.norm())
        if not least or (value.numel() >= _FEWEST and error < _ABSORBED * least):
            return None
        equals_one = (value == operands[0]).logical_or(value == operands[1])
        unchanged = float((local() != 0).logical_and(equals_one).float().mean())
        size = least / value.numel() ** 0.5
        record = describe(AbsorbedOperand, error=error / least, unchanged=unchanged, size=size)
        if value.numel() >= _FEWEST:
            return record, off
        self._repeated[record.names[1]].append((record, inherited()))
        return None

    def running_sums(self) -> list[AbsorbedOperand]:
        """Return a record for each line whose many small additions lose most of the terms, or a part of the last sum."""
        found = []
        for each in self._repeated.values():
            additions, off = [record for record, _ in each], each[-1][1]
            lost = math.hypot(*(each.error * (each.size or 0) for each in additions))
            terms = math.hypot(*(each.size or 0 for each in additions))
            times = len(additions)
            unchanged = sum(each.unchanged for each in additions) / times
            # The rounding of a state, as of a recurrent network, adds up to as much, but it changes with every step.
            has_stopped = off >= _SUM_OFF and unchanged >= _SUM_OFF / 2
            if times >= _FEWEST and (lost >= _ABSORBED * terms or has_stopped):
                figures = {"error": lost / terms, "unchanged": unchanged, "size": terms / times**0.5}
                found.append(replace(additions[-1], times=float(times), **figures))
        return found


def _are_alike(operands: Sequence[Any], value: torch.Tensor) -> bool:
    """Return whether two operands are tensors of the result's shape."""
    return len(operands) == 2 and all(isinstance(each, torch.Tensor) and each.shape == value.shape for each in operands)


def _are_comparable(pending: Pending, value: torch.Tensor) -> bool:
    """Return whether no operand of an addition is so small that half of it may be lost: rounding takes 2^-9 of the result."""
    operands, numbers = pending.given
    if numbers or value.numel() < _FEWEST:
        return False
    return min(float(each.float().norm()) for each in operands[:2]) > _LEAST_KEPT * float(value.norm())
