"""Finds conversions that torch makes without a word, in a step that is computed twice: fractions that are written to integers,
and a column and a vector whose difference is a matrix."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import OperatorCall, is_in_forward
from mpinspect.ranges.faults.measure.rounded_numbers import is_readable
from mpinspect.ranges.records import BroadcastDifference, Record, TruncatedWrite
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: The dtypes of labels and counters; 8 bits are for quantised values, which a script rounds on purpose.
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16})
#: The least share, and number, of numbers with a fraction of those that are written to integers. A single one may be a constant
#: that torch itself converts.
_FRACTIONS, _FEWEST = 0.5, 4


#: The fewest elements of a vector that is broadcast.
_FEWEST_ROWS = 8


class ImplicitConversions:
    """Records the first of each.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        self._written: TruncatedWrite | None = None
        self._broadcast: BroadcastDifference | None = None

    def ran(self, call: OperatorCall) -> None:
        """Judge an operator. Waits for the device."""
        func, args, *_, frame, in_optimizer = call
        if in_optimizer or not is_in_forward() or is_capturing():
            return
        if self._written is None and func.overloadpacket is aten.copy_:
            self._write(args[0], args[1], frame)
        if self._broadcast is None and func.overloadpacket is aten.sub and not self._module():
            self._subtract(args[0], args[1], frame)

    def records(self) -> list[Record]:
        """Return the records."""
        return list(filter(None, [self._written, self._broadcast]))

    def _subtract(self, one: Any, other: Any, frame: FrameType) -> None:
        """Judge a difference of a column and a vector. An index with None, or unsqueeze, makes a column on purpose; so does
        ``keepdim``, whose column and vector are usually of one tensor."""
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return
        column, vector = (one, other) if one.dim() == 2 else (other, one)
        rows = vector.numel()
        if rows < _FEWEST_ROWS or vector.dim() != 1 or column.shape != (rows, 1) or column._is_view():
            return
        if column.requires_grad or vector.requires_grad:
            names = ("sub", innermost_line(frame), "forward")
            self._broadcast = BroadcastDifference(name="", names=names, text=dtype_name(one.dtype), rows=rows)

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
