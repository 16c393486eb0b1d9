"""Judges calls that lose digits in any precision: distances by expanded squares, and fractions written to integers."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from mpinspect.numeric.exponents import ratio
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import OperatorCall, is_in_forward
from mpinspect.ranges.faults.measure.rounded_numbers import is_readable
from mpinspect.ranges.records import ExpandedDistance, Record, TruncatedWrite
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: Number of points of each side whose distances are computed again in FP64.
_MOST_POINTS = 256
#: The least error of distances, relative to their norm, that is recorded.
_OFF = 0.1
#: The dtypes of labels and counters; 8 bits are for quantised values, which a script rounds on purpose.
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16})
#: The least share, and number, of numbers with a fraction of those that are written to integers. A single one may be a constant
#: that torch itself converts.
_FRACTIONS, _FEWEST = 0.5, 4


class LossyCalls:
    """Records the first call of each kind.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        self._distance: ExpandedDistance | None = None
        self._written: TruncatedWrite | None = None

    def ran(self, call: OperatorCall) -> None:
        """Judge an operator. Waits for the device."""
        func, args, _, result, frame, in_optimizer = call
        is_distance, is_write = (func.overloadpacket is each for each in (aten._euclidean_dist, aten.copy_))
        if not (is_distance or is_write) or in_optimizer or not is_in_forward() or is_capturing():
            return
        if is_distance and self._distance is None:
            self._compare(args[0], args[1], result, frame)
        elif is_write and self._written is None:
            self._write(args[0], args[1], frame)

    def records(self) -> list[Record]:
        """Return the records."""
        return list(filter(None, [self._distance, self._written]))

    def _compare(self, one: Any, other: Any, distances: Any, frame: FrameType) -> None:
        """Compare some distances, which torch computes as |a|^2 + |b|^2 - 2ab, with those of the points' differences."""
        one, other, distances = (each.detach() for each in (one, other, distances))
        if (
            one.dtype is not torch.float32
            or not distances.numel()
            or not all(map(is_readable, (one, other, distances)))
        ):
            return
        # Of several batches, the first.
        one, other, distances = (each.flatten(0, -3)[0] if each.dim() > 2 else each for each in (one, other, distances))
        rows, columns = (each[:_MOST_POINTS].double() for each in (one, other))
        exact = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
        given = distances[:_MOST_POINTS, :_MOST_POINTS].double()
        error = ratio(float((given - exact).norm()), float(exact.norm()))
        if error >= _OFF:
            self._distance = ExpandedDistance(
                name=self._module(),
                names=("cdist", innermost_line(frame), "forward"),
                text="float32",
                error=error,
                largest=float(torch.maximum(rows.abs().max(), columns.abs().max())),
                typical=float(exact.median()),
            )

    def _write(self, target: Any, values: Any, frame: FrameType) -> None:
        """Judge a write of numbers with fractions into a tensor of integers, which an assignment does without a word."""
        if target.dtype not in _INTEGERS or not is_readable(target):
            return
        if not is_readable(values) or not values.is_floating_point():
            return
        lost = (values.detach() != values.detach().trunc()) & values.detach().isfinite()
        changed, of = int(lost.sum()), values.numel()
        if changed >= max(_FRACTIONS * of, _FEWEST):
            first = float(values.detach()[lost].flatten()[0])
            self._written = TruncatedWrite(
                name=self._module(),
                names=("copy_", innermost_line(frame), "forward", dtype_name(target.dtype)),
                text="float32",
                changed=changed,
                of=of,
                given=float(int(first)),
                exact=first,
            )
