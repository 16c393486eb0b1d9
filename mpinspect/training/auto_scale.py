"""``loss_scale="auto"``: the first steps are inspected; from then on the scale is dynamic below the window's top.

Gradients drift: they mostly shrink while a model learns, so that its window moves up. A block of steps is therefore inspected
again once every growth interval of the scaler (2000 steps), and at once where overflows have driven the scale out of the window.
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

from mpinspect.ranges.analysis import recommend_loss_scale
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE
from mpinspect.ranges.inspector import Inspector
from mpinspect.training.loss_scaler import LossScaler
from mpinspect.training.skipped_steps import power

_log = logging.getLogger("mpinspect.training")

#: Steps that are inspected. Gradients are at their largest in the first few.
BLOCK = 25
#: The lost L1 share at which a scale is kept, a tenth of what training needs one for: the scaler is at work anyway, and a block
#: of steps does not know the later ones. At 0.001 to 0.01 in its first 25 steps the demo's model parts from FP32 by 0.2%.
CAUTIOUS_TOLERANCE = LOST_L1_TOLERANCE / 10
#: Powers of two within which FP32 holds a scale and its inverse.
_FARTHEST = 126


@dataclass(frozen=True)
class _Found:
    """What a block of steps says: scales, as powers of two."""

    lowest: float
    highest: float
    recommended: float


class AutoScale:
    """Counts the gradients of a block of steps, tells the scaler what fits, and looks again from time to time.

    The scaler gets the window's top as its ceiling, and the recommended scale. It may fall below the window, down to the floor
    it has: overflows there say that the window no longer holds, not that the training has collapsed.

    Args:
        model, optimizers: what trains.
        scaler: dynamic; starts where it stands.
        block: steps to inspect.
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
        """Steps until the next block begins; 0 within one."""
        return 0 if self._inspector is not None else self._left

    def __str__(self) -> str:
        """Return what it is doing, a clause."""
        if self._inspector is not None:
            return f"the gradients are inspected for {self._left} more steps"
        if self._scaler.window is None:
            return "no window was found"
        lowest, highest = map(power, self._scaler.window)
        return f"within the window {lowest} .. {highest} that the inspector found"

    def resume(self, steps_to_wait: int) -> None:
        """Go on where ``steps_to_wait`` was this. A block that was under way begins again: its counts are gone."""
        self._stop()
        if steps_to_wait > 0:
            self._left = steps_to_wait
        else:
            self._begin()

    def step_ended(self, *, skipped: bool) -> None:
        """A step is over. Waits for the GPU once, at the end of a block; else only where the step was skipped."""
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
        # Should nobody care for this object any more, its inspector must not listen for ever.
        self._finalizer = weakref.finalize(self, self._inspector.detach)

    def _stop(self) -> Inspector | None:
        inspector, self._inspector = self._inspector, None
        if inspector is not None:
            self._finalizer.detach()
            inspector.detach()
        return inspector

    def detach(self) -> None:
        """Inspect no more; the scale goes on as it is."""
        self._stop()
        self._detached = True

    def _end(self) -> None:
        inspector = self._stop()
        self._left = self._scaler.rules.growth_interval
        found = self._agreed(None if inspector is None else self._read(inspector))
        if found is None:
            return
        floor = min(self._scaler.rules.floor or found.lowest, found.lowest)
        self._scaler.bound(found.lowest, found.highest, floor=floor)
        self._scaler.update(found.recommended)

    def _read(self, inspector: Inspector) -> _Found | None:
        """Return the block's advice; None where it has none. No fault of the inspection may end the training."""
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
            # Module hooks that come after torch.compile's first call stay silent: half the picture is no advice.
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
        """Return what suits every rank: they see different activations, and must keep one scale. None where one has no advice."""
        if not self._is_distributed():
            return found
        one = found or _Found(1.0, 1.0, 1.0)
        largest = [float(found is None), math.log2(one.lowest), -math.log2(one.highest), -math.log2(one.recommended)]
        flags = torch.tensor(largest, device=self._scaler._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._scaler.process_group)
        missing, lowest, highest, recommended = flags.tolist()
        return None if missing else _found(lowest, -highest, -recommended)

    def _is_distributed(self) -> bool:
        group = self._scaler.process_group
        return group is not False and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1

    def _below_window(self) -> bool:
        """Return whether overflows have driven the scale below what the layers need. Several ranks wait for their next turn."""
        window = self._scaler.window
        return window is not None and not self._is_distributed() and self._scaler.get_scale() < window[0]


def _found(log2_lowest: float, log2_highest: float, log2_recommended: float) -> _Found:
    """Within what FP32 holds, and in order: where layers conflict, what does not overflow comes first."""
    highest = min(max(log2_highest, -_FARTHEST), _FARTHEST)
    lowest = max(min(log2_lowest, highest), -_FARTHEST)
    recommended = min(max(log2_recommended, lowest), highest)
    return _Found(2.0**lowest, 2.0**highest, 2.0**recommended)
