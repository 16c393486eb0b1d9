"""Sums up, by line and module, how far operators raise the errors of their operands, in a step that is computed twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.faults.measure.origins import sample
from mpinspect.ranges.faults.measure.twins import Marks
from mpinspect.ranges.records import GradientsError

#: Number of elements from which an error is estimated: a factor of two between two of them is enough.
_SAMPLE = 1 << 11
#: Errors of this multiple of a result's size count as equal: a result that is all error has lost all that it had to lose.
_ALL_ERROR = 2.0


@dataclass(slots=True)
class _Line:
    """The operators of a line in a module: the logarithm of the factor by which they raise errors, and the worst one's record."""

    growth: float
    most: float
    record: GradientsError


class Growth:
    """Follows the relative error of tensors, by storage, through the operators of a forward and a backward.

    Args:
        rounding: the relative error of rounding once. Smaller errors are not followed.
    """

    def __init__(self, rounding: float = 2.0**-8) -> None:
        self._rounding = rounding
        self._errors: Marks[float] = Marks()
        self._lines: dict[tuple[str, ...], _Line] = {}

    def ran(
        self,
        operands: Iterable[torch.Tensor],
        result: torch.Tensor,
        value: torch.Tensor,
        twin: torch.Tensor,
        describe: Callable[[], GradientsError],
    ) -> None:
        """Compare the error of a finite result with the largest one of its operands. Waits for the device.

        Args:
            operands: the operator's tensors.
            result: what it returned.
            value, twin: its result, as it is judged, and the exact one.
            describe: makes a record of the operator at its line.
        """
        before = max([self._rounding, *filter(None, map(self._errors.of, operands))])
        exact = sample(twin, _SAMPLE)
        error = min(ratio(float((sample(value, _SAMPLE) - exact).norm()), float(exact.norm())), _ALL_ERROR)
        # False for the NaN of a twin that is infinite.
        is_off = error > self._rounding
        self._errors.put(result, error if is_off else None)
        if not is_off and before <= self._rounding:
            return
        growth = math.log2((error if is_off else self._rounding) / before)
        record = describe()
        line = self._lines.setdefault((record.name, *record.names[1:3]), _Line(0.0, growth, record))
        line.growth += growth
        if growth > line.most:
            line.most, line.record = growth, record

    def at_once(self) -> float:
        """Return the most bits that a single operator has added to an error."""
        return max((each.most for each in self._lines.values()), default=0.0)

    def most(self) -> GradientsError | None:
        """Return the record of the line that raises errors most, with its share of all that lines do; None if none does."""
        worst = max(self._lines.values(), key=lambda each: each.growth, default=None)
        if worst is None or worst.growth <= 1:
            return None
        return replace(worst.record, share=worst.growth / sum(max(each.growth, 0.0) for each in self._lines.values()))
