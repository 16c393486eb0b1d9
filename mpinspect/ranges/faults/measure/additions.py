"""Finds additions whose smaller operand is absorbed by the larger one, in a step that is computed twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mpinspect.ranges.faults.measure.kept_sums import KeptSums
from mpinspect.ranges.faults.measure.operands import Judged, Pending, summands
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import AbsorbedOperand
from mpinspect.runtime.user_line import innermost_line

#: An operand above this part of the sum can't lose half of itself to rounding, with a margin of 4.
_LEAST_KEPT = 2.0**-6
#: An addition is recorded if it loses this part of the smaller operand's norm, or of the norm of a running sum's terms.
_ABSORBED = 0.5
#: The relative error from which on a sum of many terms is recorded; ordinary rounding of its terms makes far less.
_SUM_OFF = 0.1
#: The least number of elements of an addition that is judged alone: a few may be absorbed by chance. Also that of many terms.
_FEWEST = 64
#: Sums from here down are those of a mask, such as -1e4, or the smallest number of the scores' dtype.
_MASKED = -5e3
#: The least number of terms of a running sum, and the largest number of its elements.
_FEWEST_TERMS, _MOST_ELEMENTS = 8, 1 << 24


class _RunningSum:
    """Additions at one line; each one's operand is the previous one's result.

    Args:
        line: the line.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self.times = 0
        #: The sum of the exact terms and that of the rounding errors, without those of the first addition.
        self.terms: torch.Tensor | None = None
        self.off: torch.Tensor | None = None
        #: Sums over the additions: of the shares of elements that stayed as they were, and of the squared norms of the terms.
        self.unchanged = self.squares = 0.0

    def add(self, before: torch.Tensor, exact: torch.Tensor, value: torch.Tensor) -> None:
        """Add the term and the error of an addition, which made ``value`` of the sum as it was ``before``."""
        term, off = exact - before, value - exact
        self.times += 1
        self.unchanged += float((value == before).count_nonzero()) / value.numel()
        self.squares += float(term.norm()) ** 2 / value.numel()
        self.terms = term if self.terms is None else self.terms.add_(term)
        self.off = off if self.off is None else self.off.add_(off)


class RunningSums:
    """Adds up the errors of additions, each of which continues the one before it."""

    def __init__(self) -> None:
        #: The running sums by the storage of the last result, and by line, with a record of an addition.
        self._sum_of: Marks[_RunningSum] = Marks()
        #: The running sum of one element that a number is made of.
        self._behind: Marks[_RunningSum] = Marks()
        self._sums: dict[str, tuple[AbsorbedOperand, list[_RunningSum]]] = {}

    def follow(self, judged: Judged) -> None:
        """Add an addition to the running sum that it continues, or begin one."""
        pending, value = judged.pending, judged.value
        given, line = judged.args[:2], innermost_line(pending.frame)
        if not line or value.numel() > _MOST_ELEMENTS:
            return
        sums = ((each, self._sum_of.of(each)) for each in given if isinstance(each, torch.Tensor))
        before, found = next(((each, one) for each, one in sums if one and one.line == line), (None, None))
        if before is None or found is None or before.shape != value.shape:
            found = _RunningSum(line)
        else:
            if not found.times:
                at_line = self._sums.get(line) or (judged.describe(AbsorbedOperand, error=0.0, unchanged=0.0), [])
                at_line[1].append(found)
                self._sums[line] = at_line
            # An operator in place has overwritten the sum as it was.
            found.add(before if pending.old is None else pending.old, judged.local(), value)
        self._sum_of.put(value, found)

    def passed_on(self, given: Sequence[Any], value: torch.Tensor) -> None:
        """Follow a running sum of one element through a product or a cast."""
        if value.numel() == 1 and isinstance(given[0], torch.Tensor):
            self._behind.put(value, self._sum_of.of(given[0]) or self._behind.of(given[0]))

    def behind(self, number: torch.Tensor) -> tuple[str, int]:
        """Return the line of the running sum that a number is made of, and the number of its terms; "" and 0 without one."""
        found = self._sum_of.of(number) or self._behind.of(number)
        # The first addition is not counted.
        return ("", 0) if found is None else (found.line, found.times + 1)

    def records(self) -> list[AbsorbedOperand]:
        """Return a record for each line whose running sums lose most of their terms, or a part of many."""
        found = []
        for record, sums in self._sums.values():
            times = max(each.times for each in sums)
            lost = math.hypot(*(float(each.off.norm()) for each in sums if each.off is not None))
            terms = math.hypot(*(float(each.terms.norm()) for each in sums if each.terms is not None))
            is_lost = lost >= _ABSORBED * terms or (times >= _FEWEST and lost >= _SUM_OFF * terms)
            if terms and is_lost and times >= _FEWEST_TERMS:
                of = sum(each.times for each in sums)
                size = math.sqrt(sum(each.squares for each in sums) / of)
                unchanged = sum(each.unchanged for each in sums) / of
                found.append(replace(record, error=lost / terms, unchanged=unchanged, size=size, times=float(times)))
        return found


class Additions:
    """Judges the additions of a forward alone, and those of running sums together.

    Args:
        kept: the tensors that persist from step to step, whose changes in place it judges itself.
    """

    def __init__(self, kept: KeptSums) -> None:
        self._kept = kept
        self.sums = RunningSums()

    def judge(self, judged: Judged) -> tuple[AbsorbedOperand, torch.Tensor] | None:
        """Return the record of an addition in 16 bits that loses most of an operand, and the error of its result.

        Waits for the device.
        """
        pending, value, _, local, describe = judged
        is_in_place = pending.func._schema.is_mutable
        given = judged.args[:2]
        if is_in_place and pending.node is None and self._kept.keeps(given[0]):
            return None
        self.sums.follow(judged)
        is_small = value.numel() < _FEWEST
        if is_small and not is_in_place and pending.node is None:
            self._keeps_sum(judged)
        if is_small or (not is_in_place and (not _are_alike(given, value) or _are_comparable(pending, value))):
            # A small number, as against a division by zero, may be lost; a running sum in place may not.
            return None
        operands = summands(pending, local())
        if not _are_alike(operands, value):
            return None
        # A mask absorbs the scores on purpose.
        shown = local() > _MASKED
        off = (value.float() - local()).where(shown, 0.0)
        operands = [each.where(shown, 0.0) for each in operands]
        least, error = min(float(each.norm()) for each in operands), float(off.norm())
        if not least or error < _ABSORBED * least:
            return None
        equals_one = (value == operands[0]).logical_or(value == operands[1])
        unchanged = float((local() != 0).logical_and(equals_one)[shown].float().mean())
        size = least / value.numel() ** 0.5
        return describe(AbsorbedOperand, error=error / least, unchanged=unchanged, size=size), off

    def _keeps_sum(self, judged: Judged) -> None:
        """Judge a result of few elements that may replace a kept sum: it is not a tensor of the script's own yet."""
        given = judged.args[:2]
        if not any(map(self._kept.keeps, given)) or len(operands := summands(judged.pending, judged.local())) != 2:
            return
        by_size = sorted(zip(operands, given, strict=True), key=lambda each: float(each[0].abs().max()))
        if self._kept.keeps(by_size[1][1]):
            self._kept.added(judged.value, by_size[1][0], by_size[0][0], judged.describe)


def _are_alike(operands: Sequence[Any], value: torch.Tensor) -> bool:
    """Return whether two operands are tensors of the result's shape."""
    return len(operands) == 2 and all(isinstance(each, torch.Tensor) and each.shape == value.shape for each in operands)


def _are_comparable(pending: Pending, value: torch.Tensor) -> bool:
    """Return whether no operand of an addition is so small that half of it may be lost: rounding takes 2^-9 of the result."""
    operands, numbers = pending.given
    if numbers or value.numel() < _FEWEST:
        return False
    return min(float(each.float().norm()) for each in operands[:2]) > _LEAST_KEPT * float(value.norm())
