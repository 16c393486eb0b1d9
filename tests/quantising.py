"""The values that a recipe's operand holds, by the scales and the rounding with which ``counting.blocks`` computes losses."""

import torch

from mpinspect.counting import blocks
from mpinspect.numeric.recipes import Quantization


def quantised(tensor: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return the values in float32 with the tensor's shape, rounded to nearest; a block with an infinity or NaN becomes NaN."""
    values = blocks._matrix(tensor)
    out = torch.empty_like(values, dtype=torch.float32)
    size = blocks._size(values.shape, quantization.block)
    targets = [blocks._in_blocks(region, each) for region, each, _ in blocks._regions(out, size, (0, 0), values.shape)]
    for (found, scale), target in zip(blocks._with_scales(values, quantization), targets, strict=True):
        rounded = blocks._rounded(blocks._divided(found.float(), scale), quantization.format) * scale
        target.copy_(torch.where(scale.isfinite(), rounded, torch.nan))
    return out.reshape(tensor.shape)
