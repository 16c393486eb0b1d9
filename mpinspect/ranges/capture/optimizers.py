"""The optimizers of the model, and what their steps do to its weights: which updates rounding would lose.

An update dw is lost where w + dw rounds back to w in the format that stores the weights. That is tested element by element by
rounding itself, not by a fixed ratio of update to weight: whether an update survives depends on the weight's place between its
neighbours (BF16 1 - 2^-9, BF16 1 + 2^-8, FP16 1 + 2^-11, FP16 1 - 2^-12 are all lost, the first and the last because the gap
below a power of two is half the gap above).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mpinspect.counting.cpu import available
from mpinspect.counting.fastest import count
from mpinspect.counting.pieces import detached_values
from mpinspect.ranges.capture.layers import WatchedParameter
from mpinspect.ranges.capture.observations import Observer
from mpinspect.ranges.capture.tally import Sample, Tally, dtype_name, passed_through
from mpinspect.ranges.kinds import UPDATE
from mpinspect.ranges.session import TensorKey
from mpinspect.runtime.distributed import local_part

_EXPONENT_FIELD = 0x7F800000

#: The storage formats in which updates are tested, by the names of mpinspect.numeric.formats.
STORAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Elements judged at a time on a CPU: the intermediate tensors stay in its caches, and torch does not split them over threads.
_CHUNK = 1 << 15


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside a trainer's wrappers, which is the one that torch's hooks see; None if there is none."""
    for name in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return plain_optimizer(inner)
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


class ModelOptimizers:
    """Knows the optimizers that step parameters of the model: those given, and those found as they step.

    Args:
        given: the user's.
        parameters: the model's, by id.
    """

    def __init__(self, given: Iterable[torch.optim.Optimizer], parameters: Mapping[int, WatchedParameter]) -> None:
        self._parameters = parameters
        self._ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        for optimizer in given:
            self._ours[optimizer] = True
        #: Optimizers (by id) inside a scaler's step that have not stepped themselves.
        self._in_scaler_step: set[int] = set()
        #: Optimizers (by id) whose step has begun and not ended.
        self._in_step: set[int] = set()
        #: Whether any has stepped, and whether a scaler has stepped any.
        self.any_stepped = self.scaler_has_stepped = False

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this optimizer belongs to the model."""
        known = self._ours.get(optimizer)
        if known is None:
            known = self._ours[optimizer] = next(self.parameters(optimizer), None) is not None
        return known

    def parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[WatchedParameter]:
        """Return the model's parameters among the optimizer's."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                watched = self._parameters.get(id(parameter))
                if watched is not None:
                    yield watched

    def begin_step(self) -> None:
        """Forget the optimizers' steps that are under way."""
        self._in_scaler_step.clear()
        self._in_step.clear()

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a scaler is about to step an optimizer, or to skip its step."""
        if self.owns(optimizer):
            self._in_scaler_step.add(id(optimizer))
            self.scaler_has_stepped = True

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer is about to step. Returns whether it belongs to the model."""
        self._in_scaler_step.discard(id(optimizer))
        return self.owns(optimizer)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the step of an optimizer of the model is under way."""
        self._in_step.add(id(optimizer))

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer has stepped. Returns whether it belongs to the model."""
        self._in_step.discard(id(optimizer))
        ours = self.owns(optimizer)
        self.any_stepped |= ours
        return ours

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that a scaler's step is over. Returns whether it skipped the optimizer's.

        A step that began and did not end was undone: a closure's second evaluation overflowed, say.
        """
        skipped = id(optimizer) in self._in_scaler_step or id(optimizer) in self._in_step
        self._in_scaler_step.discard(id(optimizer))
        self._in_step.discard(id(optimizer))
        return skipped

    def states(self) -> set[int]:
        """Return the ids of the tensors that the optimizers keep beside the parameters."""
        return {
            id(value)
            for optimizer, ours in self._ours.items()
            if ours
            for state in optimizer.state.values()
            if isinstance(state, dict)
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }

    @property
    def any_fused(self) -> bool:
        """Whether one of them takes found_inf on the device, so that nobody on the host knows if it stepped."""
        return any(skips_on_device(optimizer) for optimizer, ours in self._ours.items() if ours)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is fused: it reads found_inf on the device and skips without anyone knowing on the host."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _held_still(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of parameters that this step will not move: learning rate 0, as in the first step of a warm-up."""
    groups = [group for group in optimizer.param_groups if isinstance(group.get("lr"), float) and group["lr"] == 0.0]
    return {id(parameter) for group in groups for parameter in group["params"]}


class Updates(Observer):
    """Counts what a step adds to the weights, and what rounding would lose of it. Holds one copy of them meanwhile.

    Args:
        tally: takes the samples.
        optimizers: the model's.
        wanted: whether updates are counted at all.
    """

    def __init__(self, tally: Tally, optimizers: ModelOptimizers, wanted: bool) -> None:
        self._tally = tally
        self._optimizers = optimizers
        self._wanted = wanted
        self._before: dict[int, list[tuple[WatchedParameter, torch.Tensor]]] = {}

    def begin_step(self, sampled: bool, watched: bool) -> None:
        """Be at work in a sampled step."""
        self.at_work = sampled and self._wanted

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that the optimizer is about to move."""
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
        """Count the difference to the copies."""
        may_have_skipped = getattr(optimizer, "found_inf", None) is not None
        for watched, weight in self._before.pop(id(optimizer), ()):
            gradient = watched.parameter.grad
            if gradient is not None and weight.is_floating_point():
                key = TensorKey(watched.name, UPDATE)
                with self._tally.unread.left_out(key):
                    self._count(key, watched.parameter, weight, gradient, may_have_skipped)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the copies: that step did not happen."""
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
    ) -> None:
        after = detached_values(local_part(parameter))
        wide = torch.float64 if before.dtype == torch.float64 else torch.float32
        update = after.to(wide) - before.to(wide)
        row, stored, lost = count(update), passed_through(before.dtype), {}
        if stored == "float32":
            lost = lost_updates_by_format(before, update)
        elif gradient.layout is torch.strided and not may_have_skipped:
            lost = {stored: unmoved(before, after, detached_values(local_part(gradient)))}
        self._tally.add(Sample(key, row, update.numel(), dtype_name(before.dtype)))
        for name, counts in lost.items():
            self._tally.add_lost_updates(key, name, counts, measured=stored != "float32")


# -- lost updates ------------------------------------------------------------------------------------------------------


def lost_updates_by_format(weight: torch.Tensor, update: torch.Tensor) -> dict[str, torch.Tensor]:
    """``lost_updates`` for each of STORAGE_DTYPES, by name; with numba, of FP32 tensors on a CPU, in one read of both."""
    loops = available.loops()
    if loops is not None and loops.lost.takes(weight, update):
        return dict(zip(STORAGE_DTYPES, loops.lost.lost_updates(weight, update), strict=True))
    return {name: lost_updates(weight, update, dtype) for name, dtype in STORAGE_DTYPES.items()}


@torch.no_grad()
def lost_updates(weight: torch.Tensor, update: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how many updates are lost if the weight is stored in ``dtype``.

    Exact: round(w16 + dw) == w16 to nearest, ties to even, with w16 = round(w) and the sum unrounded. Elements whose
    w16 or update is not finite are left out. Nothing leaves the device; no synchronisation.

    Args:
        weight: before the step, any shape, float32 or float16/bfloat16.
        update: what the step adds, float32, same shape.
        dtype: torch.float16 or torch.bfloat16.

    Returns:
        int64 tensor of shape (2,) on the weight's device: (lost, non-zero).
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
    # Half the step between neighbours, from the exponent field alone; subnormals share the step of the smallest normal.
    power = (magnitude.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    half_step = power.clamp_min(info.smallest_normal).mul_(info.eps / 2)
    # Below a power of two the step is half as long (not below the smallest normal, where subnormals go on).
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
    """Return how many weights did not move although their gradient is not zero.

    Args:
        before, after: the weight around the step, one dtype.
        gradient: strided, of the same shape.

    Returns:
        int64 tensor of shape (2,): (unmoved, non-zero gradients).
    """
    wanted = (gradient != 0) & torch.isfinite(gradient)
    return torch.stack([(wanted & (before == after)).sum(), wanted.sum()])
