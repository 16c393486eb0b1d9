"""An observer that counts the optimizers' updates of the weights, and the updates that rounding would lose.

An update dw is lost if w + dw rounds back to w in the format that stores the weights. Each element is tested by the
rounding rule itself, not by a fixed ratio of update to weight: whether an update survives depends on the weight's
distance to its neighbours (for a weight of 1: BF16 1 - 2^-9, BF16 1 + 2^-8, FP16 1 + 2^-11, FP16 1 - 2^-12 are all
lost, the first and the last because the gap below a power of two is half the gap above).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpinspect.counting.cpu import available
from mpinspect.counting.fastest import count
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.optimizers import ModelOptimizers, states_of
from mpinspect.ranges.capture.tally import Sample, Tally, dtype_name, passed_through
from mpinspect.ranges.kinds import UPDATE
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.runtime.distributed import local_part

_EXPONENT_FIELD = 0x7F800000

#: The tested storage formats, by the names of mpinspect.numeric.formats.
STORAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Elements tested at a time on a CPU, so that intermediate tensors stay in cache and torch uses a single thread.
_CHUNK = 1 << 15
#: Names of optimizers' states that hold the part of an update that rounding cut off.
_KAHAN = ("compensation", "kahan")


class Updates(Observer):
    """Counts the updates of the weights in an optimizer's step, and the updates that rounding would lose.

    Holds one copy of the weights during the step.

    Args:
        tally: receives the samples.
        optimizers: the model's optimizers.
        wanted: returns whether updates are counted at all in the step that begins.
    """

    def __init__(self, tally: Tally, optimizers: ModelOptimizers, wanted: Callable[[], bool]) -> None:
        self._tally, self._optimizers, self._wanted = tally, optimizers, wanted
        self._before: dict[int, list[tuple[WatchedParameter, torch.Tensor]]] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Work only in sampled steps."""
        self.at_work = sampled and self._wanted()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that the optimizer is about to update."""
        if not self.at_work:
            return
        still = _held_still(optimizer)
        before = self._before[id(optimizer)] = []
        for watched in self._optimizers.parameters(optimizer):
            moves = watched.parameter.requires_grad or watched.parameter.grad is not None
            if watched.counted and moves and id(watched.parameter) not in still:
                with self._tally.unread.left_out(TensorKey(watched.name, UPDATE)):
                    before.append((watched, detached_values(local_part(watched.parameter)).clone()))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the differences between the weights and their copies."""
        may_have_skipped = getattr(optimizer, "found_inf", None) is not None
        for watched, weight in self._before.pop(id(optimizer), ()):
            gradient = watched.parameter.grad
            if gradient is not None and weight.is_floating_point():
                key = TensorKey(watched.name, UPDATE)
                with self._tally.unread.left_out(key):
                    states = states_of(optimizer, watched.parameter)
                    self._count(key, watched.parameter, weight, gradient, may_have_skipped, states)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the copies of the weights, since the step was skipped."""
        self._before.pop(id(optimizer), None)

    def forget(self) -> None:
        """Drop all copies."""
        self._before.clear()

    @torch.no_grad()
    def _count(
        self,
        key: TensorKey,
        parameter: torch.Tensor,
        before: torch.Tensor,
        gradient: torch.Tensor,
        may_have_skipped: bool,
        states: Mapping[str, Any],
    ) -> None:
        after = detached_values(local_part(parameter))
        wide = torch.float64 if before.dtype == torch.float64 else torch.float32
        update = after.to(wide) - before.to(wide)
        row, stored, lost = count(update), passed_through(before.dtype), {}
        if stored == "float32":
            lost = lost_updates_by_format(before, update)
        elif gradient.layout is torch.strided and not may_have_skipped:
            lost = {stored: unmoved(before, after, detached_values(local_part(gradient)))}
            _forget_what_is_kept(lost[stored], states, after)
        self._tally.add(Sample(key, row, update.numel(), dtype_name(before.dtype)))
        for name, counts in lost.items():
            self._tally.add_lost_updates(key, name, counts, measured=stored != "float32")


def _forget_what_is_kept(lost: torch.Tensor, states: Mapping[str, Any], weight: torch.Tensor) -> None:
    """Count no update as lost if a state holds the rounding errors: a wider master, or (by its name) Kahan compensation."""
    for name, state in states.items():
        if not isinstance(state, torch.Tensor):
            continue
        values = detached_values(local_part(state))
        if values.shape != weight.shape:
            continue
        if any(word in name for word in _KAHAN):
            lost[0] = 0
        elif values.is_floating_point() and values.dtype.itemsize > weight.dtype.itemsize:
            # On the device, without waiting for it.
            lost[0] *= (values.to(weight.dtype) != weight).any()


def _held_still(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of parameters with a learning rate of 0 (at the start of a warm-up), which this step won't change."""
    groups = [group for group in optimizer.param_groups if isinstance(group.get("lr"), float) and group["lr"] == 0.0]
    return {id(parameter) for group in groups for parameter in group["params"]}


def lost_updates_by_format(weight: torch.Tensor, update: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``lost_updates`` for each of STORAGE_DTYPES, by name; numba counts FP32 tensors on a CPU in a single pass."""
    loops = available.loops()
    if loops is not None and loops.lost.takes(weight, update):
        return dict(zip(STORAGE_DTYPES, loops.lost.lost_updates(weight, update), strict=True))
    return {name: lost_updates(weight, update, dtype) for name, dtype in STORAGE_DTYPES.items()}


@torch.no_grad()
def lost_updates(weight: torch.Tensor, update: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how many updates are lost if the weight is stored in ``dtype``.

    The test is exact: round(w16 + dw) == w16 with w16 = round(w), to nearest with ties to even, and no rounding of the sum
    before. Elements whose w16 or update is not finite are left out. Runs on the device and does not synchronise.

    Args:
        weight: the weight before the step, of any shape; float32, float16 or bfloat16.
        update: the change that the step makes to it; float32, same shape.
        dtype: torch.float16 or torch.bfloat16.

    Returns:
        int64 tensor of shape (2,) on the weight's device: (lost updates, non-zero updates).
    """
    weight, update = weight.detach().reshape(-1), update.detach().reshape(-1)
    if weight.device.type != "cpu" or weight.numel() <= _CHUNK:
        return _lost(weight, update, dtype)
    pieces = zip(torch.split(weight, _CHUNK), torch.split(update, _CHUNK), strict=True)
    return torch.stack([_lost(*piece, dtype) for piece in pieces]).sum(dim=0)


def _lost(weight: torch.Tensor, update: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    stored = weight.to(dtype)
    value = stored.to(torch.float32)
    magnitude = value.abs()
    info = torch.finfo(dtype)
    # Half the spacing of neighbouring values, from the exponent field; subnormals have the smallest normal's spacing.
    power = (magnitude.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    half_step = power.clamp_min(info.smallest_normal).mul_(info.eps / 2)
    # Below a power of two the spacing halves, except below the smallest normal, where subnormals continue it.
    inward = torch.signbit(value) != torch.signbit(update)
    shorter = inward.logical_and_(magnitude == power).logical_and_(magnitude > info.smallest_normal)
    half_step = torch.where(shorter, half_step / 2, half_step)
    size = update.abs()
    even = (stored.view(torch.int16) & 1) == 0
    counted = (size > 0).logical_and_(size < math.inf).logical_and_(magnitude < math.inf)
    lost = (size == half_step).logical_and_(even).logical_or_(size < half_step).logical_and_(counted)
    return torch.stack([lost.sum(), counted.sum()])


@torch.no_grad()
def unmoved(before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return how many weights the step left unchanged although their gradient is finite and not zero.

    Weights that the step made infinite or NaN are left out.

    Args:
        before, after: the weight before and after the step, of the same dtype.
        gradient: the weight's gradient, strided, of the same shape.

    Returns:
        int64 tensor of shape (2,): (unchanged weights, weights that should have moved).
    """
    wanted = (gradient != 0) & torch.isfinite(gradient) & torch.isfinite(after)
    return torch.stack([(wanted & (before == after)).sum(), wanted.sum()])
