"""Counts the blocks of a CUDA matrix with ``blocks.cu``; ``counting.blocks`` is the oracle."""

from __future__ import annotations

import math

import torch

from mpinspect.counting.cuda import driver
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT, BlockCounts

_KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
#: A group of lanes reads a block, so a larger one would leave most of the GPU idle. Counters of a launch have 32 bits.
_MOST_ELEMENTS, _MOST_VALUES = 1 << 16, 1 << 31
_THREADS, _WARP = 256, 32
_CLASSES, _EXPONENTS = len(CUTS) + 1, 128 - LOWEST_EXPONENT
#: The parts of the result, as in ``blocks.cu``.
_PARTS = (2 * _CLASSES * DISTANCES, len(CUTS), _EXPONENTS, _EXPONENTS, 4)


def takes(values: torch.Tensor, size: tuple[int, int]) -> bool:
    """Return whether ``count`` can count a matrix in blocks of this size."""
    return values.dtype in _KINDS and math.prod(size) <= _MOST_ELEMENTS and values.numel() < _MOST_VALUES


def count(values: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> BlockCounts:
    """Count the blocks of a matrix; waits for the GPU once.

    Args:
        values: matrix that ``takes`` accepts, with any strides.
        size: rows and columns of a block, which divide the matrix's.
        block: the size that the result names.

    Raises:
        OSError, RuntimeError: the kernel could not be compiled, loaded or launched.
    """
    elements, number = math.prod(size), values.numel() // math.prod(size)
    found = torch.zeros(sum(_PARTS), dtype=torch.int64, device=values.device)
    if values.stride(0) < values.stride(1):
        # The transposed blocks have the same elements.
        values, size = values.T, (size[1], size[0])
    (high, wide), (rows, columns), (down, right) = values.shape, size, values.stride()
    lanes = min(1 << (columns - 1).bit_length(), _WARP)
    matrix = (values.data_ptr(), found.data_ptr(), down, right, high // rows, wide // columns, rows, columns, lanes)
    most = -(-number * lanes // _THREADS)
    driver.gpu_of(values.device).launch("blocks", _KINDS[values.dtype], most, driver.MATRIX, matrix)
    counters, over, maxima, nonzero, (zeros, zero, broken, tiny) = (
        part.tolist() for part in torch.split(found.cpu(), list(_PARTS))
    )
    others, powers = (_by_class(counters[kind::2]) for kind in range(2))
    return BlockCounts(
        block,
        tuple(tuple(map(sum, zip(*pair, strict=True))) for pair in zip(others, powers, strict=True)),
        powers,
        tuple(maxima),
        tuple(nonzero),
        tuple(over),
        zeros=zeros,
        blocks=number,
        zero_blocks=zero,
        broken_blocks=broken,
        broken_elements=broken * elements,
        tiny_blocks=tiny,
        tiny_elements=tiny * elements,
    )


def _by_class(counts: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(counts[start : start + DISTANCES]) for start in range(0, len(counts), DISTANCES))
