"""An observer that measures the loss from accumulating 16-bit gradients over micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mpinspect.ranges import records
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Backward, ParameterGradient
from mpinspect.ranges.capture.tally import dtype_name
from mpinspect.ranges.faults.measure.measuring import NARROW, Measuring, Run, Sent

#: Maximum number of gradient elements that are copied from one backward to the next.
_MOST_COPIED = 1 << 24
#: Maximum number of recorded steps, and of recorded parameters per step (the parameters that lose most).
_MOST_STEPS, _MOST_PARAMETERS = 3, 3


class Accumulation(Measuring):
    """Compares .grad before and after each micro-batch of measured steps: an element that adding a non-zero gradient did not
    change has lost that gradient. Only a step's last micro-batch is recorded, whose gradient is added to the largest sum.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = 0
        #: Copies of the accumulated gradients, by the parameter's id, from the end of one backward to the end of the next.
        self._before: dict[int, torch.Tensor] = {}
        #: Numbers of lost and of non-zero elements, still on the device, with the dtype, by name; and their micro-batch.
        self._lost: dict[str, tuple[torch.Tensor, str]] = {}
        self._micro_batch = 0

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in measured steps."""
        self.at_work = self._clock.measured and self._steps < _MOST_STEPS
        self._before.clear()

    @torch.no_grad()
    def parameter_gradients(self, gradients: list[ParameterGradient], backward: Backward) -> None:
        """Compare the accumulated gradients with their copies from before this backward, and copy them for the next."""
        before, self._before = self._before, {}
        room = _MOST_COPIED
        for each in gradients:
            parameter = each.watched.parameter
            total = parameter.grad
            if total is None or total.dtype not in NARROW or not (is_plain(total) and is_plain(each.values)):
                continue
            earlier = before.get(id(parameter))
            if earlier is not None and earlier.shape == total.shape and each.values.data_ptr() != total.data_ptr():
                added = (each.values != 0) & torch.isfinite(total)
                lost = torch.stack([(added & (earlier == total)).sum(), added.sum()])
                self._lost[each.watched.name] = lost, dtype_name(total.dtype)
                self._micro_batch = backward.micro_batch
            if total.numel() <= room:
                room -= total.numel()
                self._before[id(parameter)] = total.clone()

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the parameters that lost most, with the sums over all."""
        super().end_step(step, sampled)
        lost, self._lost = self._lost, {}
        self._before.clear()
        if self.at_work and lost:
            self._steps += 1
            counts = Sent.of((name, counts) for name, (counts, _) in lost.items())
            dtypes = {name: dtype for name, (_, dtype) in lost.items()}
            self._send(counts, partial(self._tell, step, dtypes, self._micro_batch + 1))

    def _tell(self, step: int, dtypes: dict[str, str], micro_batches: int, counts: dict[str, Any]) -> None:
        rows = [(name, dtypes[name], *pair) for name, pair in counts.items()]
        rows.sort(key=lambda row: row[2] / max(row[3], 1), reverse=True)
        for name, dtype, missed, added in rows[:_MOST_PARAMETERS]:
            self._record(
                records.Accumulation(
                    name=name,
                    step=step,
                    text=dtype,
                    lost=missed,
                    nonzero=added,
                    micro_batches=micro_batches,
                    all_lost=sum(row[2] for row in rows),
                    all_nonzero=sum(row[3] for row in rows),
                )
            )
