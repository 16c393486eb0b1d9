"""Counts elements by their distance below their block's largest magnitude, with numba's loops; ``counting.blocks`` is the oracle.

A tile holds some blocks, sixteen elements to a vector, padded with zeros to whole vectors: in the tensor's memory where it is
laid out so, otherwise as a copy in the first-level cache. The vectors of a tile are listed by the class of their block. A value
adds bit d of a word to its class's ``planes``, d its distance. In tiles whose magnitudes lie 32 or more powers of two apart, the
larger distances have planes of their own. Powers of two are found along the way and counted one by one, and so are blocks whose
largest magnitude is so small that subnormals lie within the planes' reach.

Exponents can be counted along with the blocks. Where the magnitudes of a tile lie within 32 powers of two, one shift more makes
the bit of a value's exponent from its distance; other tiles are read once more while they are in the cache. Importing compiles
the loops or reads them from numba's cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from mpinspect.counting.bits import merge_rows
from mpinspect.counting.cpu import block_layout as layout
from mpinspect.counting.cpu import kernels, planes, shares
from mpinspect.counting.cpu.block_tiles import add_tiles, finish, new_tile, place_of, without_owners
from mpinspect.counting.cpu.block_vectors import transpose
from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.counter import address, threads_for
from mpinspect.counting.cpu.memory import pointer
from mpinspect.counting.cpu.vectors import LANES
from mpinspect.counting.layout import NARROW, ZEROS
from mpinspect.numeric.blocks import DISTANCES, BlockCounts


@compiled
def _is_dense(given: Any) -> Any:
    """Return whether the blocks follow each other in memory without gaps or padding."""
    is_padded = given[layout.PADDED] != given[layout.ROWS] * given[layout.COLUMNS]
    return (
        given[layout.ROWS] == 1 and given[layout.STRIDE] == given[layout.WIDE] * given[layout.COLUMNS] and not is_padded
    )


@compiled
def _next_blocks(given: Any, first: Any, last: Any) -> Any:
    """Return the number of blocks of the next tile; of several tiles that need no copy."""
    most = max(1, layout.TILE // given[layout.PADDED])
    blocks = min(last - first, most)
    if _is_dense(given) and given[layout.BYTES] == 4 and layout.TILE % given[layout.PADDED] == 0:
        tiles = min((last - first) // most, layout.TOGETHER // layout.TILE)
        return tiles * most if tiles else blocks
    if given[layout.COLUMNS] == 1:
        # Columns of one row of blocks, sixteen at a time where possible.
        blocks = min(blocks, given[layout.WIDE] - first % given[layout.WIDE])
        blocks -= blocks % LANES if blocks > LANES else 0
    return blocks


@compiled
def _copy(given: Any, values: Any, first: Any, blocks: Any, tile: Any) -> None:
    """Copy blocks from the number ``first`` on into a tile, each padded."""
    columns, stride = given[layout.COLUMNS], given[layout.STRIDE]
    for k in range(blocks):
        at = (first + k) // given[layout.WIDE] * given[layout.ROWS] * stride + (first + k) % given[
            layout.WIDE
        ] * columns
        target = k * given[layout.PADDED]
        for _row in range(given[layout.ROWS]):
            # numba copies slices element by element.
            row, source = tile[target : target + columns], values[at : at + columns]
            for j in range(len(row)):
                row[j] = source[j]
            at, target = at + stride, target + columns
        tile[target : (k + 1) * given[layout.PADDED]] = values.dtype.type(0)


@compiled
def _transpose_columns(given: Any, values: Any, first: Any, blocks: Any, tile: Any, scratch: Any) -> None:
    """Copy blocks of one column into the tile's words."""
    rows, stride = given[layout.ROWS], given[layout.STRIDE]
    start = first // given[layout.WIDE] * rows * stride + first % given[layout.WIDE]
    source, step = place_of(values) + 4 * start, 4 * stride
    if given[layout.BYTES] == 2:
        for row in range(rows):
            at = start + row * stride
            kernels.widen(values[at : at + blocks], given[layout.IS_BF16], tile.wide[row * blocks :], scratch)
        source, step = place_of(tile.wide), 4 * blocks
    for row in range(0, rows, LANES):
        transpose(source + row * step, step, blocks // LANES, place_of(tile.words) + 4 * row, 4 * rows)


@compiled
def _words_of(given: Any, values: Any, narrow: Any, first: Any, blocks: Any, tile: Any, scratch: Any) -> Any:
    """Return the address of blocks as float32 words, in memory or in the tile, with zeros up to a group of sixteen vectors.

    Args:
        narrow: the tile's array of elements like the values'.
    """
    elements, length = given[layout.ROWS] * given[layout.COLUMNS], blocks * given[layout.PADDED]
    is_narrow, is_padded, is_dense = given[layout.BYTES] == 2, given[layout.PADDED] != elements, _is_dense(given)
    if is_dense and not is_narrow and length % planes.COLUMNS == 0:
        return place_of(values) + 4 * first * elements
    if given[layout.COLUMNS] == 1 and blocks % LANES == 0 and not is_padded:
        _transpose_columns(given, values, first, blocks, tile, scratch)
    elif is_dense and is_narrow:
        kernels.widen(values[first * elements : first * elements + length], given[layout.IS_BF16], tile.words, scratch)
    else:
        _copy(given, values, first, blocks, narrow)
        if is_narrow:
            kernels.widen(narrow[:length], given[layout.IS_BF16], tile.words, scratch)
    tile.words[length : -(-length // planes.COLUMNS) * planes.COLUMNS] = np.uint32(0)
    return place_of(tile.words)


@compiled
def _add_blocks(given: Any, first: Any, last: Any, tile: Any, counting: Any, found: Any) -> None:
    """Count the blocks of these numbers."""
    vectors = given[layout.PADDED] // LANES
    while first < last:
        blocks = _next_blocks(given, first, last)
        if given[layout.BYTES] == 2:
            halves = kernels.carray(pointer(given[layout.ADDRESS], np.uint16(0)), (layout.ALL,))
            words = _words_of(given, halves, tile.narrow, first, blocks, tile, counting.scratch)
        else:
            whole = kernels.carray(pointer(given[layout.ADDRESS], np.uint32(0)), (layout.ALL,))
            words = _words_of(given, whole, tile.words, first, blocks, tile, counting.scratch)
        is_apart = given[layout.EXPONENTS] and tile.window[layout.IS_APART]
        if is_apart:
            # So many tiles at once that the memory is read all the time.
            kernels.add_float32(counting, words, blocks * given[layout.PADDED])
        is_copy, is_alone = words == place_of(tile.words), is_apart or not given[layout.EXPONENTS]
        add_tiles(tile, words, blocks, vectors, layout.AHEAD * (not is_copy), found, counting, is_alone)
        first += blocks


def _work(address: Any) -> None:
    given = shares.carray(pointer(shares.job_at(address)[shares.VALUES], np.int64(0)), (layout.FIELDS,))
    own, found = shares.own_part(address), shares.result_of(address)
    owners = kernels.counting32(found[layout.ROW :]), new_tile(given[layout.PADDED])
    counting, tile = kernels.without_owners(owners[0]), without_owners(owners[1])
    start, length, turn = shares.next_values(address, own, 0)
    while length:
        first, last = start // given[layout.UNIT], (start + length) // given[layout.UNIT]
        _add_blocks(given, first, last, tile, counting, found)
        start, length, turn = shares.next_values(address, own, turn)
    finish(owners[1], found, counting.row)
    kernels.finish32(owners[0])


@compiled_for("void(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def _count(work: Any, given: Any, length: Any, found: Any, width: Any, threads: Any, team: Any) -> None:
    results = np.zeros((threads, width), np.int64)
    used = shares.run(work, given, length, results, team)
    total = shares.carray(pointer(found, np.int64(0)), (width,))
    total[: layout.ROW] = 0
    kernels.add_rows(results[:used], total[: layout.ROW])
    kernels.merge(results[:used, layout.ROW :], total[layout.ROW :])


_WORK = function_of_c(_work)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def takes(values: torch.Tensor, size: tuple[int, int]) -> bool:
    """Return whether ``count`` can count a matrix in blocks of this size."""
    return (
        values.is_cpu
        and values.dtype in _DTYPES
        and math.prod(size) <= layout.MOST_ELEMENTS
        and not values._is_zerotensor()
    )


def count(
    values: torch.Tensor, size: tuple[int, int], block: tuple[int, int], row: torch.Tensor | None = None
) -> BlockCounts:
    """Count the blocks of a matrix.

    Args:
        values: matrix that ``takes`` accepts, with any strides.
        size: rows and columns of a block, which divide the matrix's.
        block: the size that the result names.
        row: the exponents of all elements are added to it if given, int64, shape (NARROW.length,).
    """
    (high, wide), (rows, columns) = values.shape, size
    if high == 1 or (values.stride(1) != 1 and values.stride(0) == 1):
        # The transposed blocks have the same elements.
        values, high, wide, rows, columns = values.T, wide, high, columns, rows
    if values.stride(1) != 1 and wide > 1:
        values = values.contiguous()
    elements, number = rows * columns, values.numel() // (rows * columns)
    padded = -(-elements // LANES) * LANES
    unit = min(1 << (padded - 1).bit_length(), layout.TILE)
    threads, team = threads_for(values.numel())
    given = np.zeros(layout.FIELDS, np.int64)
    given[layout.ADDRESS], given[layout.BYTES] = address(values), values.dtype.itemsize
    given[layout.IS_BF16], given[layout.EXPONENTS] = values.dtype is torch.bfloat16, row is not None
    given[layout.WIDE], given[layout.STRIDE] = wide // columns, values.stride(0) if high > 1 else wide
    given[layout.ROWS], given[layout.COLUMNS], given[layout.PADDED], given[layout.UNIT] = rows, columns, padded, unit
    found = np.empty(layout.ROW + NARROW.length, np.int64)
    _count(_WORK, given.ctypes.data, number * unit, found.ctypes.data, len(found), threads, team)
    if row is not None:
        found[layout.ROW + ZEROS] -= number * (padded - elements)
        row.copy_(merge_rows([row, torch.from_numpy(found[layout.ROW :])]))
    distances, powers = (
        tuple(map(tuple, each))
        for each in found[: layout.MAXIMA].reshape(layout.KINDS, layout.CLASSES, DISTANCES).tolist()
    )
    inside, (*over, zero) = slice(layout.TINY_FIELD, layout.BROKEN_FIELD), found[layout.OVER : layout.ROW].tolist()
    fields, zeros = (
        found[layout.MAXIMA : layout.ZEROS_AT][::-1] // (padded // LANES),
        found[layout.ZEROS_AT : layout.OVER],
    )
    maxima, broken, tiny = fields[inside], int(fields[layout.BROKEN_FIELD]), int(fields[: layout.TINY_FIELD].sum())
    nonzero = maxima * padded - zeros[inside]
    return BlockCounts(
        block,
        distances,
        powers,
        tuple(maxima.tolist()),
        tuple(nonzero.tolist()),
        (over[0], over[1]),
        zeros=elements * (number - broken - tiny) - int(nonzero.sum()),
        blocks=number,
        zero_blocks=zero,
        broken_blocks=broken,
        broken_elements=broken * elements,
        tiny_blocks=tiny,
        tiny_elements=tiny * elements,
    )
