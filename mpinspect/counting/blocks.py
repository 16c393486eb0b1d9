"""Counts and quantises tensors in blocks that share a scale, in torch, on any device.

A block has rows and columns; the columns lie along the dimension that the product sums over (``numeric.recipes``). Rows and
columns that no block divides leave smaller blocks at the end, as if padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mpinspect.counting.pieces import detached_values
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT, BlockCounts, QuantizationLoss
from mpinspect.numeric.formats import FLOAT8_E4M3, FloatFormat
from mpinspect.numeric.recipes import (
    CEIL,
    E4M3_SCALE,
    EVEN,
    FLOOR,
    POWER_OF_TWO,
    STOCHASTIC,
    WHOLE,
    Quantization,
)

#: The exponents of a scale of eight bits without mantissa (E8M0).
_LEAST_SCALE, _GREATEST_SCALE = -127, 127
#: The number of elements examined at once; some temporary tensors have 8 bytes an element.
_AT_ONCE = 1 << 22


def count_blocks(tensor: torch.Tensor, block: tuple[int, int] = (1, 32)) -> BlockCounts:
    """Return how far each element lies below the largest magnitude of its block, as exact integers.

    Waits for the tensor's device.

    Args:
        tensor: floating point, of any shape (float64 is counted as float32). All but the last dimension are rows. The blocks lie
            along the last dimension: pass the transposed matrix for the product that sums over its rows.
        block: rows and columns of a block, each 1 or more, or 0 for all.

    Raises:
        TypeError: the tensor is not of a floating-point dtype.
        ValueError: a negative size of a block, or a tensor on the meta device.
    """
    values = _matrix(tensor).abs()
    size = _size(values, block)
    blocks = _in_blocks(values, size)
    peak = blocks.amax(dim=(1, 3), keepdim=True)
    significand, exponent = _split(peak)
    is_broken, is_zero = ~peak.isfinite(), peak == 0
    is_tiny = ~is_broken & ~is_zero & (exponent < LOWEST_EXPONENT)
    inside = _in_blocks(torch.ones_like(values, dtype=torch.bool), size)
    found = BlockCounts(
        block,
        blocks=peak.numel(),
        zero_blocks=int(is_zero.sum()),
        broken_blocks=int(is_broken.sum()),
        tiny_blocks=int(is_tiny.sum()),
    )
    for piece in _pieces(blocks, inside, significand, exponent, is_broken, is_tiny):
        found += _counted(block, *piece)
    return found


def _counted(
    block: tuple[int, int],
    blocks: torch.Tensor,
    inside: torch.Tensor,
    significand: torch.Tensor,
    exponent: torch.Tensor,
    is_broken: torch.Tensor,
    is_tiny: torch.Tensor,
) -> BlockCounts:
    """Return the elements of some blocks, of shape (R, rows, C, columns); the rest has a value for each block."""
    counted = inside & ~(is_broken | is_tiny)
    nonzero = counted & (blocks != 0)
    own_significand, own_exponent = _split(blocks)
    distance = (exponent - own_exponent).clamp(0, DISTANCES - 1)
    kind = sum((significand > cut).long() for cut in CUTS)
    slot = (kind * DISTANCES + distance)[nonzero]
    is_power = (own_significand == 1)[nonzero]
    over = [int((nonzero & (distance == 0) & (own_significand > cut)).sum()) for cut in CUTS]
    return BlockCounts(
        block,
        _rows(slot),
        _rows(slot[is_power]),
        (over[0], over[1]),
        zeros=int((counted & (blocks == 0)).sum()),
        broken_elements=int((inside & is_broken).sum()),
        tiny_elements=int((inside & is_tiny).sum()),
    )


def quantised(tensor: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return the values that a recipe's operand holds, in float32 with the tensor's shape, rounded to nearest.

    A block with an infinity or NaN becomes NaN. Waits for the device on MPS alone, where the CPU computes it.

    Raises:
        TypeError, ValueError: as ``count_blocks``.
    """
    values = _matrix(tensor)
    size = _size(values, quantization.block)
    blocks = _in_blocks(values, size)
    scale = _scales(blocks.abs(), quantization)
    rounded = _rounded(_divided(blocks, scale), quantization.format).mul_(scale)
    whole = torch.where(scale.isfinite(), rounded, torch.nan)
    return _out_of_blocks(whole, values.shape).reshape(tensor.shape).to(tensor.device)


def quantization_loss(tensor: torch.Tensor, quantization: Quantization) -> QuantizationLoss:
    """Return what quantising a tensor by a recipe loses. Waits for the device.

    Raises:
        TypeError, ValueError: as ``count_blocks``.
    """
    values = _matrix(tensor).abs()
    size = _size(values, quantization.block)
    blocks = _in_blocks(values, size)
    inside = _in_blocks(torch.ones_like(values, dtype=torch.bool), size)
    found = QuantizationLoss()
    for piece in _pieces(blocks, inside, _scales(blocks, quantization)):
        found += _lost(quantization, *piece)
    return found


def _lost(
    quantization: Quantization, magnitudes: torch.Tensor, inside: torch.Tensor, scale: torch.Tensor
) -> QuantizationLoss:
    """Return the loss of some blocks, of shape (R, rows, C, columns), with their scales."""
    is_finite = scale.isfinite().expand_as(magnitudes)
    scaled = torch.where(is_finite, _divided(magnitudes, scale), 0.0)
    rounded = _rounded(scaled, quantization.format)
    x = torch.where(is_finite, magnitudes, 0.0).double()
    q = (rounded * torch.where(is_finite, scale, 0.0)).double()
    flushed = (rounded == 0) & (x != 0)
    # A scale rounded to FP32 may leave the block's maximum a little above the format's.
    tolerance = 0.0 if quantization.is_power_of_two else 2.0**-20
    noise = (q - x).square()
    if quantization.rounding == STOCHASTIC:
        noise = _variance(scaled, quantization.format).double() * scale.nan_to_num(0, 0, 0).double().square()
    return QuantizationLoss(
        nonzero=int((x != 0).sum()),
        flushed=int(flushed.sum()),
        clipped=int((scaled > quantization.format.max_finite * (1 + tolerance)).sum()),
        broken=int((inside & ~is_finite).sum()),
        magnitudes=float(x.sum()),
        lost=float(x[flushed].sum()),
        squares=float(x.square().sum()),
        products=float((x * q).sum()),
        noise=float(noise.sum()),
    )


# -- scales ------------------------------------------------------------------------------------------------------------------


def _scales(magnitudes: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return each block's divisor, of shape (R, 1, C, 1): 1 for blocks of zeros, 0 for scales that are flushed, NaN if broken."""
    format = quantization.format
    peak = magnitudes.amax(dim=(1, 3), keepdim=True)
    if quantization.scale == POWER_OF_TWO:
        scale = _power_of_two(_power(peak, quantization))
    elif quantization.scale == E4M3_SCALE:
        scale = _two_level(peak, format)
    else:
        scale = peak / format.max_finite
    scale = torch.where(peak == 0, 1.0, scale)
    return torch.where(peak.isfinite(), scale, torch.nan)


def _power(peak: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    format = quantization.format
    significand, exponent = _split(peak)
    cut = {
        FLOOR: 2.0,
        CEIL: 1.0,
        # The significand from which the maximum rounds up to the next power of two.
        EVEN: 2.0 - 2.0 ** -(format.mantissa_bits + 1) - 2.0**-23,
    }.get(quantization.rule, format.max_significand)
    power = exponent - format.max_exponent + (significand > cut)
    return power.clamp(_LEAST_SCALE, _GREATEST_SCALE)


def _two_level(peak: torch.Tensor, format: FloatFormat) -> torch.Tensor:
    """Return NVFP4's divisors: a scale in E4M3 for each block, below one in FP32 for the tensor (TransformerEngine's rule)."""
    finite = torch.where(peak.isfinite(), peak, 0.0)
    if not peak.numel():
        return peak
    peak_of_all = finite.amax()
    # A number divided by a tensor would be its reciprocal's product, which rounds twice.
    whole = torch.full_like(peak_of_all, FLOAT8_E4M3.max_finite * format.max_finite) / peak_of_all
    return _rounded(finite / format.max_finite * whole, FLOAT8_E4M3) / whole


# -- elements ----------------------------------------------------------------------------------------------------------------


def _divided(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values / scale; 0 where a scale was flushed."""
    return torch.where(scale == 0, 0.0, values / scale)


def _quantum(values: torch.Tensor, format: FloatFormat) -> torch.Tensor:
    """Return the distance between neighbouring numbers of the format at each value."""
    exponent = _split(values)[1].clamp(min=format.min_normal_exponent)
    return _power_of_two(exponent - format.mantissa_bits)


def _rounded(values: torch.Tensor, format: FloatFormat) -> torch.Tensor:
    """Return values rounded to nearest, ties to even, and saturated."""
    quantum = _quantum(values, format)
    return (values / quantum).round_().mul_(quantum).clamp_(-format.max_finite, format.max_finite)


def _variance(magnitudes: torch.Tensor, format: FloatFormat) -> torch.Tensor:
    """Return the expected squared error of stochastic rounding: (x - low) (high - x) between neighbouring numbers."""
    quantum = _quantum(magnitudes, format)
    fraction = (magnitudes.clamp(max=format.max_finite) / quantum).frac()
    return fraction * (1 - fraction) * quantum.square()


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float32, exactly (a vectorised ``pow`` may be one unit off)."""
    return ((exponent + 1023) << 52).view(torch.float64).float()


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return significands in [1, 2) and exponents floor(log2|x|), int64; 0 and a very low exponent for 0."""
    mantissa, exponent = torch.frexp(values)
    return mantissa * 2, torch.where(values == 0, -1000, exponent.long() - 1)


# -- blocks ------------------------------------------------------------------------------------------------------------------


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in float32 as a matrix, on the CPU if they are on MPS."""
    values = detached_values(tensor)
    if not values.is_floating_point():
        raise TypeError(f"a tensor of {values.dtype} has no scales: give one of a floating-point dtype")
    if values.is_meta:
        raise ValueError("a tensor on the meta device has no values to count")
    if values.device.type == "mps":
        # It has no float64.
        values = values.cpu()
    columns = values.shape[-1] if values.dim() else 1
    return values.float().reshape(values.numel() // max(columns, 1), columns)


def _size(values: torch.Tensor, block: tuple[int, int]) -> tuple[int, int]:
    if min(block) < 0:
        raise ValueError(f"a block of {block} has a negative size: give rows and columns, or 0 for all")
    rows, columns = (each if each != WHOLE else max(whole, 1) for each, whole in zip(block, values.shape, strict=True))
    return rows, columns


def _in_blocks(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return values as (R, rows, C, columns), padded with zeros."""
    (rows, columns), (height, width) = size, values.shape
    padded = torch.nn.functional.pad(values, (0, -width % columns, 0, -height % rows))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _pieces(blocks: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield parts of blocks along their longest dimension, with the same parts of others that have it."""
    dim = max(range(blocks.dim()), key=lambda each: blocks.shape[each])
    length = blocks.shape[dim]
    step = max(1, length * _AT_ONCE // max(blocks.numel(), 1))
    for start in range(0, length, step):
        size = min(step, length - start)
        yield tuple(each.narrow(dim, start, size) if each.shape[dim] == length else each for each in (blocks, *others))


def _out_of_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    high, rows, wide, columns = blocks.shape
    return blocks.reshape(high * rows, wide * columns)[: shape[0], : shape[1]]


def _rows(slots: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    counts: list[int] = torch.bincount(slots, minlength=(len(CUTS) + 1) * DISTANCES).tolist()
    return tuple(tuple(counts[start : start + DISTANCES]) for start in range(0, len(counts), DISTANCES))
