"""Which parameter updates rounding would lose: w + dw rounds back to w in the format that stores the weights.

Tested element by element by rounding itself, not by a fixed ratio of update to weight: whether an update survives
depends on the weight's place between its neighbours (BF16 1 - 2^-9, BF16 1 + 2^-8, FP16 1 + 2^-11, FP16 1 - 2^-12 are
all lost, the first and the last because the gap below a power of two is half the gap above).
"""

from __future__ import annotations

import math

import torch

from mpinspect.counting.cpu import available

_EXPONENT_FIELD = 0x7F800000

#: Storage formats asked about, by the names of mpinspect.numeric.formats.
STORAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


#: Elements judged at a time on a CPU: the intermediate tensors stay in its caches, and torch does not split them over threads.
_CHUNK = 1 << 15


def lost_updates_by_format(weight: torch.Tensor, update: torch.Tensor) -> dict[str, torch.Tensor]:
    """``lost_updates`` for each of STORAGE_DTYPES, by name; with numba, of FP32 tensors on a CPU, in one read of both."""
    loops = available.loops()
    if loops is not None and loops.lost.takes(weight, update):
        return dict(zip(STORAGE_DTYPES, loops.lost.lost_updates(weight, update), strict=True))
    return {name: lost_updates(weight, update, dtype) for name, dtype in STORAGE_DTYPES.items()}


@torch.no_grad()
def lost_updates(weight: torch.Tensor, update: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How many updates are lost if the weight is stored in ``dtype``.

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
    """How many weights did not move although their gradient is not zero.

    Args:
        before, after: the weight around the step, one dtype.
        gradient: strided, of the same shape.

    Returns:
        int64 tensor of shape (2,): (unmoved, non-zero gradients).
    """
    wanted = (gradient != 0) & torch.isfinite(gradient)
    return torch.stack([(wanted & (before == after)).sum(), wanted.sum()])
