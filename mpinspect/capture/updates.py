"""Which parameter updates rounding would lose: w + dw rounds back to w in the format that stores the weights.

Tested element by element by rounding itself, not by a fixed ratio of update to weight: whether an update survives
depends on the weight's place between its neighbours (BF16 1 - 2^-9, BF16 1 + 2^-8, FP16 1 + 2^-11, FP16 1 - 2^-12 are
all lost, the first and the last because the gap below a power of two is half the gap above).
"""

from __future__ import annotations

import torch

#: Storage formats asked about, by the names of mpinspect.formats.
STORAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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
    stored = weight.detach().to(dtype)
    codes = stored.view(torch.int16).to(torch.int32) & 0x7FFF
    magnitude = _value(codes, dtype)
    # At the largest finite value the code above is inf; its step is that of the code below.
    above = torch.where(_value(codes + 1, dtype).isinf(), 2 * magnitude - _value(codes - 1, dtype), _value(codes + 1, dtype))
    below = torch.where(codes > 0, _value((codes - 1).clamp_min_(0), dtype), -above)
    outward = torch.where(torch.signbit(stored), -update, update)
    # Around zero both directions are alike.
    half_gap = torch.where(outward >= 0, above - magnitude, magnitude - below) / 2
    size = outward.abs()
    even = (codes & 1) == 0
    counted = (update != 0) & torch.isfinite(update) & torch.isfinite(magnitude)
    lost = counted & ((size < half_gap) | ((size == half_gap) & even))
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


def _value(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values of magnitude codes."""
    return codes.clamp_min(0).to(torch.int16).view(dtype).to(torch.float32)
