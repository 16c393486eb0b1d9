"""An observer that counts the gradients which DistributedDataParallel has averaged over the ranks, in a few steps of a run."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch

from mpinspect.counting.fastest import count
from mpinspect.counting.layout import decode
from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.ranges.capture.host_rows import HostCopy
from mpinspect.ranges.capture.largest import is_plain
from mpinspect.ranges.capture.observations import Backward
from mpinspect.ranges.faults.measure.measuring import Measuring, Run
from mpinspect.ranges.session import Measurement
from mpinspect.runtime.distributed import copy_held, has_process_group

#: The name of the measurement.
AVERAGED = "gradients-averaged"


class Averaged(Measuring):
    """Counts ``.grad`` of all parameters together when the optimizer steps: averaged, unscaled, and clipped where the script
    clips. Works only on the first rank, in the first sampled step at or after 0, 1, 2, 4, 8, ...

    The figures of the measurement are elements by exponent ("-12"), and "zeros" and "nonfinite".
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._next_step = 0
        #: Whether a backward has reached the model in this step.
        self._has_gradients = False
        #: The rows counted in this step, by device and length.
        self._rows: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Activate this observer in the first sampled step at or after twice the last counted step's number."""
        self.at_work = sampled and self._clock.step >= self._next_step
        self._has_gradients = False
        self._rows.clear()

    def backward_begins(self, backward: Backward) -> None:
        """Record that the gradients are of this step: an optimizer with a closure steps before its backward."""
        self._has_gradients = True

    @torch.no_grad()
    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the gradients that the optimizer receives, unless they are still scaled, as a fused optimizer's may be."""
        if not (self.at_work and self._has_gradients and has_process_group()):
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            return
        for watched in self._optimizers.parameters(optimizer):
            gradient = watched.parameter.grad
            if watched.counted and gradient is not None and is_plain(gradient) and watched.parallel is not None:
                held = copy_held(watched.parallel)
                if held.is_first and held.replicas > 1:
                    row = count(gradient)
                    self._rows[row.device, len(row)].append(row)

    def end_step(self, step: int, sampled: bool) -> None:
        """Record the counts that have reached the host."""
        super().end_step(step, sampled)
        if self._rows and sampled:
            self._next_step = max(2 * step, 1)
            copies = [HostCopy(torch.stack(group)) for group in self._rows.values()]
            self._arrivals.call(copies, partial(self._tell, step, copies))
        self._rows.clear()

    def _tell(self, step: int, copies: list[HostCopy]) -> None:
        rows = [row for copy in copies for row in copy.values()]
        self._recording.measured(Measurement(AVERAGED, "", step, _figures(merge(map(decode, rows)))))


def _figures(found: ExponentHistogram) -> dict[str, float]:
    counts = {str(found.min_exponent + place): float(number) for place, number in enumerate(found.counts) if number}
    return counts | {"zeros": float(found.zeros), "nonfinite": float(found.nonfinite)}
