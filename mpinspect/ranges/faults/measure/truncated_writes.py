"""Finds fractions that are written to integers, in a step that is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.operands import OperatorCall, is_in_forward
from mpinspect.ranges.faults.measure.rounded_numbers import is_readable
from mpinspect.ranges.records import Record, TruncatedWrite
from mpinspect.runtime.device import is_capturing
from mpinspect.runtime.user_line import innermost_line

aten = torch.ops.aten

#: The dtypes of labels and counters; 8 bits are for quantised values, which a script rounds on purpose.
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16})
#: The least share, and number, of numbers with a fraction of those that are written to integers. A single one may be a constant
#: that torch itself converts.
_FRACTIONS, _FEWEST = 0.5, 4


class TruncatedWrites:
    """Records the first such write.

    Args:
        module: returns the dotted path of the module that is running.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        self._written: TruncatedWrite | None = None

    def ran(self, call: OperatorCall) -> None:
        """Judge an operator. Waits for the device."""
        func, args, *_, frame, in_optimizer = call
        is_write = self._written is None and func.overloadpacket is aten.copy_
        if is_write and not in_optimizer and is_in_forward() and not is_capturing():
            self._write(args[0], args[1], frame)

    def records(self) -> list[Record]:
        """Return the records."""
        return list(filter(None, [self._written]))

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
