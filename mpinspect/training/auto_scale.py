"""``loss_scale="auto"``: inspects the first steps, then leaves the scale dynamic up to the highest recommended scale.

Gradients mostly shrink while a model learns, so that the window of suitable scales moves up. Another block of steps is
therefore inspected every growth interval of the scaler (2000 steps), and immediately if overflows drive the scale below
the window.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mpinspect.ranges.analysis.loss_scale import recommend_loss_scale
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.inspector import Inspector
from mpinspect.reporting.words import number_or_power
from mpinspect.runtime.distributed import world_size
from mpinspect.training.loss_scaler import LossScaler

_log = logging.getLogger("mpinspect.training")

#: Steps in an inspected block. Gradients are largest in the first few steps.
BLOCK = 25
#: The lost share of the L1 norm from which a scale is recommended here: a tenth of the general threshold, since the scaler runs
#: anyway and a block does not show later steps. With 0.001 to 0.01 lost in 25 steps, the demo model differs 0.2% from FP32.
CAUTIOUS_TOLERANCE = LOST_L1_TOLERANCE / 10
#: The largest |log2| of a scale such that FP32 holds the scale and its inverse.
_FARTHEST = 126


@dataclass(frozen=True)
class _Found:
    """The scales recommended by a block of steps."""

    lowest: float
    highest: float
    recommended: float


class AutoScale:
    """Counts the gradients of a block of steps, sets the scaler's scale and bounds, and repeats this from time to time.

    The scaler gets the recommended scale, and the window's highest scale as its ceiling. The scale may fall below the window,
    down to the scaler's floor: overflows there mean that the window is out of date, not that the training has collapsed.

    Args:
        model, optimizers: the model being trained and its optimizers.
        scaler: a dynamic scaler; its current scale is the starting point.
        block: number of steps to inspect.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        scaler: LossScaler,
        block: int = BLOCK,
    ) -> None:
        self._inspect = functools.partial(Inspector, model, optimizers=list(optimizers), scalers=scaler, watch=False)
        self._scaler = scaler
        self._block = block
        self._clean = 0
        self._detached = False
        self._inspector: Inspector | None = None
        self._seen: frozenset[object] = frozenset()
        self._begin()

    @property
    def steps_to_wait(self) -> int:
        """The number of steps until the next inspected block begins; 0 within a block."""
        if self._inspector is not None:
            return 0
        return self._left

    def __str__(self) -> str:
        """Return a clause on the state of the inspection and the window found."""
        if self._inspector is not None:
            return f"the gradients are inspected for {self._left} more steps"
        if self._scaler.window is None:
            return "no window was found"
        lowest, highest = map(number_or_power, self._scaler.window)
        return f"within the window {lowest} .. {highest} that the inspector found"

    def resume(self, steps_to_wait: int) -> None:
        """Resume with a saved ``steps_to_wait``; an interrupted block (0) starts over, since its counts are lost."""
        self._stop()
        if steps_to_wait > 0:
            self._left = steps_to_wait
        else:
            self._begin()

    def step_ended(self, *, skipped: bool) -> None:
        """Record a completed step, and begin or end a block if due.

        Waits for the GPU once at the end of a block; outside a block, only if the step was skipped.
        """
        if self._detached:
            return
        self._left -= 1
        self._clean += not skipped
        if self._inspector is None:
            if self._left <= 0 or (skipped and self._below_window()):
                self._begin()
        elif self._left <= 0:
            self._end()

    def _begin(self) -> None:
        self._left = self._block
        self._clean = 0
        self._inspector = self._inspect().attach()
        # If this object is garbage-collected, its inspector must be detached too.
        self._finalizer = weakref.finalize(self, self._inspector.detach)

    def _stop(self) -> Inspector | None:
        inspector, self._inspector = self._inspector, None
        if inspector is not None:
            self._finalizer.detach()
            inspector.detach()
        return inspector

    def detach(self) -> None:
        """Stop inspecting; the scaler's current scale and bounds stay."""
        self._stop()
        self._detached = True

    def _end(self) -> None:
        inspector = self._stop()
        self._left = self._scaler.rules.growth_interval
        found = self._agreed(self._read(inspector))
        if found is None:
            return
        floor = min(self._scaler.rules.floor or found.lowest, found.lowest)
        self._scaler.bound(found.lowest, found.highest, floor=floor)
        self._scaler.update(found.recommended)

    def _read(self, inspector: Inspector | None) -> _Found | None:
        """Return the block's recommended scales, or None; log errors of the inspection instead of raising them."""
        if inspector is None:
            return None
        try:
            seen = frozenset(inspector.session().totals())
            report = inspector.report()
            advice = report.loss_scale
            if advice.needed is False:
                advice = recommend_loss_scale(report.session, tolerance=CAUTIOUS_TOLERANCE)
        except Exception:
            _log.warning("inspecting the gradients failed: the loss scale stays dynamic as it is", exc_info=True)
            return None
        if 2 * self._clean < self._block:
            _log.info("the loss scale stays dynamic as it is: most of the steps inspected were skipped")
            return None
        if not seen >= self._seen:
            # Module hooks registered after torch.compile's first call do not run: incomplete counts give no advice.
            _log.info("the loss scale stays as it is: fewer gradients were seen than the first time")
            return None
        if advice.recommended is None or advice.lowest is None or advice.highest is None:
            _log.info("no loss scale could be recommended (%s): it stays dynamic as it is", advice.reason)
            return None
        self._seen = seen
        _log.info(
            "loss scale %g, within %g .. %g: %s", advice.recommended, advice.lowest, advice.highest, advice.reason
        )
        return _found(math.log2(advice.lowest), math.log2(advice.highest), math.log2(advice.recommended))

    def _agreed(self, found: _Found | None) -> _Found | None:
        """Return scales suitable for every rank, since all ranks must use one scale; None if a rank has no advice."""
        if not self._is_distributed():
            return found
        one = found or _Found(1.0, 1.0, 1.0)
        largest = [float(found is None), math.log2(one.lowest), -math.log2(one.highest), -math.log2(one.recommended)]
        flags = torch.tensor(largest, dtype=torch.float32, device=self._scaler._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._scaler.process_group)
        missing, lowest, highest, recommended = flags.tolist()
        if missing:
            return None
        return _found(lowest, -highest, -recommended)

    def _is_distributed(self) -> bool:
        group = self._scaler.process_group
        return group is not False and world_size(group) > 1

    def _below_window(self) -> bool:
        """Return whether overflows have driven the scale below the window; always False with several ranks."""
        window = self._scaler.window
        return window is not None and not self._is_distributed() and self._scaler.get_scale() < window[0]


def _found(log2_lowest: float, log2_highest: float, log2_recommended: float) -> _Found:
    """Return the scales clamped to FP32's range and ordered; if layers conflict, avoiding overflow takes precedence."""
    highest = min(max(log2_highest, -_FARTHEST), _FARTHEST)
    lowest = max(min(log2_lowest, highest), -_FARTHEST)
    recommended = min(max(log2_recommended, lowest), highest)
    return _Found(2.0**lowest, 2.0**highest, 2.0**recommended)
