"""Counts tensors, and their losses by quantising, in blocks that share a scale; ``cpu.blocks`` and ``cuda.blocks`` count faster.

A block has rows and columns; the columns lie along the dimension that the product sums over (``numeric.recipes``). Rows and
columns that no block divides leave smaller blocks at the end, as if padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from mpinspect.counting import fastest
from mpinspect.counting.bits import BINARY32, empty_row
from mpinspect.counting.cpu import available as on_cpu
from mpinspect.counting.cuda import available as on_gpu
from mpinspect.counting.pieces import detached_values
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT, BlockCounts, QuantizationLoss
from mpinspect.numeric.formats import FLOAT8_E4M3, FloatFormat
from mpinspect.numeric.recipes import CEIL, E4M3_SCALE, EVEN, FLOOR, POWER_OF_TWO, STOCHASTIC, Quantization
from mpinspect.runtime.distributed import local_part, place_of

#: The exponents of a scale of eight bits without mantissa (E8M0).
_LEAST_SCALE, _GREATEST_SCALE = -127, 127
#: Dtypes with two numbers to an element, which torch can't read.
_PACKED = (getattr(torch, "float4_e2m1fn_x2", None),)
#: The number of elements examined at once; some temporary tensors have 8 bytes an element.
_AT_ONCE = 1 << 18


def count_blocks(tensor: torch.Tensor, block: tuple[int, int] = (1, 32)) -> BlockCounts:
    """Return how far each element lies below the largest magnitude of its block, as exact integers.

    Numba's loops count float32, float16 and bfloat16 on a CPU (the extra mpinspect[cpu]), a CUDA kernel on an NVIDIA GPU, and
    otherwise torch. Waits for the tensor's device.

    Args:
        tensor: floating point, of any shape (float64 is counted as float32). All but the last dimension are rows. The blocks lie
            along the last dimension: pass the transposed matrix for the product that sums over its rows.
        block: rows and columns of a block, each 1 or more, or 0 for all.

    Of a DTensor this process's shard is counted, without communication: the ranks' counts add up. Blocks that a shard cuts are
    said in ``cut_blocks``.

    Raises:
        TypeError: not a dense tensor of a floating-point dtype.
        ValueError: a block that is not two integers, or has a negative size; a tensor on the meta device; shards along an inner
            dimension whose rows a block shares.
    """
    return blocks_and_exponents(tensor, block)[0]


def blocks_and_exponents(
    tensor: torch.Tensor, block: tuple[int, int] = (1, 32), exponents: bool = False
) -> tuple[BlockCounts, torch.Tensor | None]:
    """Return ``count_blocks`` and, if asked for, the row of ``fastest.count``, in one read where numba counts.

    Args, Raises: as ``count_blocks``.
    """
    shard = place_of(tensor)
    values = _matrix(tensor if shard is None else local_part(tensor))
    offset, whole = ((0, 0), values.shape) if shard is None else _rows_and_columns(*shard, block)
    regions = list(_regions(values, _size(whole, block), offset, whole))
    by_loops = on_cpu.BLOCKS.loops() if values.is_cpu else None
    count: Callable[..., BlockCounts] = _count
    if by_loops is not None and all(by_loops.takes(region, size) for region, size, _ in regions):
        row = empty_row(BINARY32, values.device) if exponents else None
        count = partial(by_loops.count, row=row)
    else:
        row = fastest.count(values) if exponents else None
        if values.is_cuda:
            count = _count_on_gpu
    found = BlockCounts(block, tensors=1, shards=int(tuple(whole) != tuple(values.shape)))
    for region, size, is_cut in regions:
        counts = count(region, size, block)
        found += counts.as_cut() if is_cut else counts
    return found, row


def _count_on_gpu(region: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> BlockCounts:
    counts = on_gpu.count_blocks(region, size, block)
    return _count(region, size, block) if counts is None else counts


def _count(region: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> BlockCounts:
    """Count with torch: the oracle of all other implementations."""
    blocks = _in_blocks(region, size)
    peak = _peaks(blocks)
    significand, exponent = _split(peak)
    is_broken = ~peak.isfinite()
    is_tiny = ~is_broken & (peak != 0) & (exponent < LOWEST_EXPONENT)
    elements, broken, tiny = size[0] * size[1], int(is_broken.sum()), int(is_tiny.sum())
    found = BlockCounts(
        block,
        maxima=_by_exponent(exponent[(peak != 0) & ~(is_broken | is_tiny)]),
        blocks=peak.numel(),
        zero_blocks=int((peak == 0).sum()),
        broken_blocks=broken,
        broken_elements=broken * elements,
        tiny_blocks=tiny,
        tiny_elements=tiny * elements,
    )
    for piece in _pieces(blocks, significand, exponent, ~(is_broken | is_tiny)):
        found += _counted(block, *piece)
    return found


def _counted(
    block: tuple[int, int],
    blocks: torch.Tensor,
    significand: torch.Tensor,
    exponent: torch.Tensor,
    is_counted: torch.Tensor,
) -> BlockCounts:
    """Return the elements of some blocks, of shape (R, rows, C, columns); the rest has a value for each block."""
    values = blocks.float().abs()
    nonzero = is_counted & (values != 0)
    own_significand, own_exponent = _split(values)
    distance = (exponent - own_exponent).clamp(0, DISTANCES - 1)
    kind = sum((significand > cut).long() for cut in CUTS)
    slot = (kind * DISTANCES + distance)[nonzero]
    is_power = (own_significand == 1)[nonzero]
    over = [int((nonzero & (distance == 0) & (own_significand > cut)).sum()) for cut in CUTS]
    zeros = int((is_counted & (values == 0)).sum())
    elements = _by_exponent(exponent.expand_as(values)[nonzero])
    return BlockCounts(
        block, _rows(slot), _rows(slot[is_power]), elements=elements, over=(over[0], over[1]), zeros=zeros
    )


def quantization_loss(tensor: torch.Tensor, quantization: Quantization) -> QuantizationLoss:
    """Return what quantising a tensor by a recipe loses. Waits for the device.

    Raises:
        TypeError, ValueError: as ``count_blocks``.
    """
    values = _matrix(tensor)
    pieces = (piece for blocks in _with_scales(values, quantization) for piece in _pieces(*blocks))
    return sum((_lost(quantization, *piece) for piece in pieces), QuantizationLoss())


def _lost(quantization: Quantization, blocks: torch.Tensor, scale: torch.Tensor) -> QuantizationLoss:
    """Return the loss of some blocks, of shape (R, rows, C, columns), with their scales."""
    magnitudes = blocks.float().abs()
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
        broken=int((~is_finite).sum()),
        magnitudes=float(x.sum()),
        lost=float(x[flushed].sum()),
        squares=float(x.square().sum()),
        products=float((x * q).sum()),
        noise=float(noise.sum()),
    )


# -- scales ------------------------------------------------------------------------------------------------------------------


def _with_scales(values: torch.Tensor, quantization: Quantization) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield blocks of one size at a time, and their scales."""
    size = _size(values.shape, quantization.block)
    regions = [_in_blocks(region, each) for region, each, _ in _regions(values, size, (0, 0), values.shape)]
    peaks = [_peaks(blocks) for blocks in regions]
    finite = [torch.where(peak.isfinite(), peak, 0.0).amax() for peak in peaks]
    for peak, blocks in zip(peaks, regions, strict=True):
        yield blocks, _scales(peak, torch.stack(finite).amax(), quantization)


def _scales(peak: torch.Tensor, largest: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Return each block's divisor, of shape (R, 1, C, 1): 1 for blocks of zeros, 0 for scales that are flushed, NaN if broken.

    Args:
        peak: the blocks' largest magnitudes.
        largest: the largest finite one of the whole tensor.
    """
    format = quantization.format
    if quantization.scale == POWER_OF_TWO:
        scale = _power_of_two(_power(peak, quantization))
    elif quantization.scale == E4M3_SCALE:
        scale = _two_level(peak, largest, format)
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


def _two_level(peak: torch.Tensor, largest: torch.Tensor, format: FloatFormat) -> torch.Tensor:
    """Return NVFP4's divisors: a scale in E4M3 for each block, below one in FP32 for the tensor (TransformerEngine's rule)."""
    finite = torch.where(peak.isfinite(), peak, 0.0)
    # A number divided by a tensor would be its reciprocal's product, which rounds twice.
    whole = torch.full_like(largest, FLOAT8_E4M3.max_finite * format.max_finite) / largest
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
    """Return the values as a matrix, on the CPU if they are on MPS; in float32 unless their dtype is float16 or bfloat16."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is of type {type(tensor).__name__}: give a torch.Tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of the layout {tensor.layout} has no rows of blocks: give its dense values")
    if not tensor.is_floating_point() or tensor.dtype in _PACKED:
        raise TypeError(f"a tensor of {tensor.dtype} has no scales: give one of a floating-point dtype")
    values = detached_values(tensor)
    if values.is_meta:
        raise ValueError("a tensor on the meta device has no values to count")
    if values.device.type == "mps":
        # It has no float64.
        values = values.cpu()
    *_, columns = (1, *values.shape)
    if values.dtype not in (torch.float16, torch.bfloat16):
        values = values.float()
    return values.reshape(values.numel() // max(columns, 1), columns)


def _size(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(block, tuple) or [type(each) for each in block] != [int, int] or min(block) < 0:
        raise ValueError(f"block is {block!r}: give two integers that are not negative, rows and columns, or 0 for all")
    rows, columns = (each or max(whole, 1) for each, whole in zip(block, shape, strict=True))
    return rows, columns


def _rows_and_columns(
    offset: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a shard's first row and column in the matrix of the whole tensor, and that matrix's shape."""
    if any(offset[1:-1]) and block[0] != 1:
        raise ValueError("the tensor is sharded along an inner dimension: only blocks of one row can be counted")
    rows = math.prod(shape[:-1])
    return (next(iter(offset[:-1]), 0) * math.prod(shape[1:-1]), offset[-1]), (rows, shape[-1])


def _regions(
    values: torch.Tensor, size: tuple[int, int], offset: tuple[int, int], whole: Sequence[int]
) -> Iterator[tuple[torch.Tensor, tuple[int, int], bool]]:
    """Yield the parts of a matrix that are made of blocks of one size, that size, and whether other ranks have their rest.

    Args:
        offset, whole: where the matrix begins in a sharded matrix, and that one's shape.
    """
    for band, rows, cut_above in _divided_along(0, values, size[0], offset[0], whole[0]):
        for region, columns, cut_aside in _divided_along(1, band, size[1], offset[1], whole[1]):
            yield region, (rows, columns), cut_above or cut_aside


def _divided_along(
    dim: int, values: torch.Tensor, size: int, offset: int, whole: int
) -> Iterator[tuple[torch.Tensor, int, bool]]:
    length = values.shape[dim]
    head = min(-offset % size, length)
    tail = (length - head) % size
    middle = length - head - tail
    for start, long, each, is_cut in (
        (0, head, head, True),
        (head, middle, size, False),
        (length - tail, tail, tail, offset + length < whole),
    ):
        if long and values.numel():
            yield values.narrow(dim, start, long), each, is_cut


def _in_blocks(region: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return a view of shape (R, rows, C, columns)."""
    (rows, columns), (height, width) = size, region.shape
    down, right = region.stride()
    shape = (height // rows, rows, width // columns, columns)
    return region.as_strided(shape, (rows * down, down, columns * right, right))


def _peaks(blocks: torch.Tensor) -> torch.Tensor:
    """Return each block's largest magnitude in float32, of shape (R, 1, C, 1); NaN if it has one."""
    high, low = (extreme(blocks, dim=(1, 3), keepdim=True) for extreme in (torch.amax, torch.amin))
    return torch.maximum(high, -low).float()


def _pieces(blocks: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield slices of blocks along their longest dimension, each with the same slice of the other tensors of that length."""
    dim = max(range(blocks.dim()), key=lambda each: blocks.shape[each])
    length = blocks.shape[dim]
    step = max(1, length * _AT_ONCE // max(blocks.numel(), 1))
    for start in range(0, length, step):
        size = min(step, length - start)
        yield tuple(each.narrow(dim, start, size) if each.shape[dim] == length else each for each in (blocks, *others))


def _by_exponent(exponents: torch.Tensor) -> tuple[int, ...]:
    """Count exponents from the lowest of a counted block to float32's highest."""
    return tuple(torch.bincount(exponents - LOWEST_EXPONENT, minlength=128 - LOWEST_EXPONENT).tolist())


def _rows(slots: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    counts: list[int] = torch.bincount(slots, minlength=(len(CUTS) + 1) * DISTANCES).tolist()
    return tuple(tuple(counts[start : start + DISTANCES]) for start in range(0, len(counts), DISTANCES))
