"""Counts elements by their distance below their block's largest magnitude, with numba's loops; ``counting.blocks`` is the oracle.

Blocks are copied into a tile in the first-level cache, sixteen elements to a vector, padded with zeros to whole vectors. The
vectors are sorted by the class of their block's largest significand. Each class has planes of its own (``planes``), to
which a value adds bit d of a word, d its distance. The few values with d >= 32 are counted one by one, and so are blocks whose
largest magnitude is so small that subnormals lie within the planes' reach.

Exponents can be counted along with the blocks, while the values are in the cache. Importing compiles the loops or reads
them from numba's cache.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba.types
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

from mpinspect.counting.bits import merge_rows
from mpinspect.counting.cpu import kernels, planes, shares
from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.counter import address, threads_for
from mpinspect.counting.cpu.memory import lowest_one, ones, pointer
from mpinspect.counting.cpu.vectors import I16, I32, I64, LANES, VECTOR_BYTES, Code, Words, constant
from mpinspect.counting.layout import NARROW, ZEROS
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT, BlockCounts

types: Any = numba.types

_CLASSES, _TURNS = len(CUTS) + 1, planes.COLUMNS // LANES
#: Elements of a tile, unless a block has more; and those of the largest block.
_TILE, _MOST_ELEMENTS = 4096, 1 << 16
#: Magnitudes are doubled, so that the sign is shifted out: their mantissas have 24 bits.
_FIELD, _MANTISSA = 24, (1 << 24) - 1
_CUTS = tuple(int((cut - 1) * (1 << _FIELD)) for cut in CUTS)
#: Largest magnitudes with a lower exponent field are too small to be counted at all; below the second, counted one by one.
_TINY_FIELD, _LEAST_FIELD, _BROKEN_FIELD = LOWEST_EXPONENT + 127, 64, 255
#: Powers of two in a tile from which they are added to planes, too: one by one they would take longer.
_MANY_POWERS = _TILE // 16
#: A number of elements that no tensor has.
_ALL = 1 << 48

#: The fields of the array that describes a tensor's blocks: address, bytes of an element, whether it is BF16; blocks in a row of
#: blocks; elements from one row to the next; rows, columns and padded elements of a block; the share of a job's length that
#: stands for a block; whether the exponents are counted.
_ADDRESS, _BYTES, _IS_BF16, _WIDE, _STRIDE, _ROWS, _COLUMNS, _PADDED, _UNIT, _EXPONENTS, _FIELDS = range(11)
#: The fields of a result: distances, then powers, by class; then these; then a row of exponents.
_OVER = 2 * _CLASSES * DISTANCES
_ZERO, _BROKEN, _TINY, _ROW = (_OVER + len(CUTS) + k for k in range(4))


class _Tile(NamedTuple):
    """Some blocks, and the planes of each class, for all values and for powers of two.

    Args:
        words: uint32, float32 values of whole vectors; ``narrow``, uint16, the same in 16 bits; ``wide``, uint32, rows.
        magnitudes: their doubled magnitudes, with a vector of zeros at the end.
        tops: uint32, the largest of these in each vector's block; ``limits``: the same with all bits of the mantissa.
        powers: uint64, a bit for each value that is a power of two.
        vectors: int32, shape (_CLASSES, ...): the numbers of the vectors of each class; ``lengths``, int64, how many.
        planes, lower: of each class and kind, as ``planes`` has them; ``state``: int64, the turns in ``lower``, and the blocks.
    """

    words: Any
    narrow: Any
    wide: Any
    magnitudes: Any
    tops: Any
    limits: Any
    powers: Any
    vectors: Any
    lengths: Any
    planes: Any
    lower: Any
    state: Any
    totals: Any


@compiled
def _new_tile(padded: Any) -> Any:
    # Whole groups of sixteen vectors.
    size = -(-max(_TILE, padded) // planes.COLUMNS) * planes.COLUMNS
    vectors = size // LANES
    limits = np.full(vectors + 1, np.uint32(2**32 - 1), np.uint32)
    return _Tile(
        np.zeros(size, np.uint32),
        np.zeros(size, np.uint16),
        np.zeros(size, np.uint32),
        np.zeros(size + LANES, np.uint32),
        np.zeros(vectors, np.uint32),
        limits,
        np.zeros(size // 64, np.uint64),
        np.zeros((_CLASSES, vectors + LANES), np.int32),
        np.zeros(_CLASSES, np.int64),
        np.zeros((2 * _CLASSES, planes.ROWS, planes.COLUMNS), np.uint32),
        np.zeros((2 * _CLASSES, planes.LOWER + 1, planes.COLUMNS), np.uint32),
        np.zeros((2 * _CLASSES, 2), np.int64),
        np.zeros(planes.WINDOW, np.uint32),
    )


@compiled
def _without_owners(tile: Any) -> Any:
    """Return the tile as views that count no references; the caller keeps the tile."""
    return _Tile(
        kernels.without_owner(tile.words),
        kernels.without_owner(tile.narrow),
        kernels.without_owner(tile.wide),
        kernels.without_owner(tile.magnitudes),
        kernels.without_owner(tile.tops),
        kernels.without_owner(tile.limits),
        kernels.without_owner(tile.powers),
        kernels.without_owner(tile.vectors),
        kernels.without_owner(tile.lengths),
        kernels.without_owner(tile.planes),
        kernels.without_owner(tile.lower),
        kernels.without_owner(tile.state),
        kernels.without_owner(tile.totals),
    )


# -- loops on vectors --------------------------------------------------------------------------------------------------------


def _lanes(kind: Any, values: Any) -> Any:
    return ir.Constant(kind, list(values))


def _shuffled(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    return builder.shuffle_vector(a, b, _lanes(Words, lanes))


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(Words, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, constant(I32, 0)), undefined, constant(Words, 0)
    )


def _largest_of_each(code: Code, vectors: list[Any]) -> Any:
    """Return the largest word of each of sixteen vectors."""
    while len(vectors) > 1:
        vectors = [
            code.operation("umax", *(_shuffled(code.builder, a, b, range(odd, 2 * LANES, 2)) for odd in (0, 1)))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _measure(context: Any, words: Any, magnitudes: Any, tops: Any, powers: Any, groups: Any, vectors: Any) -> Any:
    """Fill a tile's magnitudes, tops and powers from its words, in groups of sixteen vectors.

    Args:
        vectors: neighbours that share their top, a power of two up to sixteen.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, magnitudes, tops, powers, groups, vectors = arguments
        code = Code(builder)

        def body(group: Any, _: list[Any]) -> list[Any]:
            offset = builder.mul(group, constant(I64, LANES * VECTOR_BYTES))
            source, target = builder.add(words, offset), builder.add(magnitudes, offset)
            masks = builder.add(powers, builder.mul(group, constant(I64, 2 * LANES)))
            found = []
            for k in range(LANES):
                value = code.load(source, k * VECTOR_BYTES)
                magnitude = builder.add(value, value)
                code.store(magnitude, target, k * VECTOR_BYTES)
                found.append(magnitude)
                rest = builder.and_(magnitude, constant(Words, _MANTISSA))
                is_power = builder.and_(
                    builder.icmp_unsigned("==", rest, constant(Words, 0)),
                    builder.icmp_unsigned("!=", magnitude, constant(Words, 0)),
                )
                code.store(builder.bitcast(is_power, I16), masks, 2 * k)
            top = _largest_of_each(code, found)
            for step in (1, 2, 4, 8):
                other = _shuffled(builder, top, top, (lane ^ step for lane in range(LANES)))
                is_shared = builder.icmp_signed(">", vectors, constant(I64, step))
                top = builder.select(is_shared, code.operation("umax", top, other), top)
            code.store(top, builder.add(tops, builder.mul(group, constant(I64, VECTOR_BYTES))), 0)
            return []

        code.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _sort(
    context: Any, tops: Any, limits: Any, vectors: Any, row_bytes: Any, lengths: Any, powers: Any, groups: Any
) -> Any:
    """List the vectors of each class, in groups of sixteen, and fill ``limits``.

    Returns:
        (int64, int64): how many vectors belong to no class; non-zero if there are powers of two.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tops, limits, vectors, row_bytes, lengths, powers, groups = arguments
        code = Code(builder)

        def body(group: Any, state: list[Any]) -> list[Any]:
            masks, *ends = state
            here = builder.add(powers, builder.mul(group, constant(I64, 2 * LANES)))
            masks = builder.or_(masks, code.load(here, 0, masks.type))
            offset = builder.mul(group, constant(I64, VECTOR_BYTES))
            top = code.load(builder.add(tops, offset), 0)
            code.store(builder.or_(top, constant(Words, _MANTISSA)), builder.add(limits, offset), 0)
            field = builder.sub(builder.lshr(top, constant(Words, _FIELD)), constant(Words, _LEAST_FIELD))
            left = builder.icmp_unsigned("<", field, constant(Words, _BROKEN_FIELD - _LEAST_FIELD))
            first = _splat(builder, builder.trunc(builder.mul(group, constant(I64, LANES)), I32))
            numbers = builder.add(first, _lanes(Words, range(LANES)))
            new = []
            for k, (end, cut) in enumerate(zip(ends, (*_CUTS, _MANTISSA), strict=True)):
                mantissa = builder.and_(top, constant(Words, _MANTISSA))
                within = builder.and_(left, builder.icmp_unsigned("<=", mantissa, constant(Words, cut)))
                left = builder.and_(left, builder.not_(within))
                kept = code.operation("experimental.vector.compress", numbers, within, constant(Words, 0))
                row = builder.add(vectors, builder.mul(row_bytes, constant(I64, k)))
                code.store(kept, builder.add(row, builder.mul(end, constant(I64, 4))), 0)
                number = code.operation("ctpop", builder.zext(builder.bitcast(within, I16), I64))
                new.append(builder.add(end, number))
            return [masks, *new]

        none = constant(ir.VectorType(I32, LANES // 2), 0)
        masks, *ends = code.loop(groups, [none, *[constant(I64, 0)] * _CLASSES], body)
        others = builder.mul(groups, constant(I64, LANES))
        for k, end in enumerate(ends):
            code.store(end, lengths, 8 * k)
            others = builder.sub(others, end)
        found = builder.zext(code.operation("vector.reduce.or", masks, result=I32), I64)
        return context.make_tuple(builder, signature.return_type, [others, found])

    return types.UniTuple(types.int64, 2)(*[types.int64] * 7), generate


def _adder(cuts: tuple[int, ...]) -> Any:
    def add(context: Any, magnitudes: Any, limits: Any, numbers: Any, turns: Any, lower: Any, over: Any) -> Any:
        """Add listed vectors to the lower planes, sixteen a turn; return non-zero if a value has a distance of 32 or more.

        Args:
            numbers: address of the vectors' numbers.
            lower: address of the planes' first sixteen columns to fill; each turn fills the next sixteen.
            over: address of int64s, to which the numbers of values beyond each cut are added.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            magnitudes, limits, numbers, turns, lower, over = arguments
            code = Code(builder)

            def body(turn: Any, state: list[Any]) -> list[Any]:
                offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
                listed, here = builder.add(numbers, offset), builder.add(lower, offset)
                far, *beyond = state
                sums = planes.Sums(code)
                for k in range(LANES):
                    number = builder.zext(code.load(listed, 4 * k, I32), I64)
                    magnitude = code.load(builder.add(magnitudes, builder.mul(number, constant(I64, VECTOR_BYTES))), 0)
                    limit = code.load(builder.add(limits, builder.mul(number, constant(I64, 4))), 0, I32)
                    below = builder.sub(_splat(builder, limit), magnitude)
                    distance = builder.lshr(below, constant(Words, _FIELD))
                    inside = builder.icmp_unsigned("<", distance, constant(Words, planes.WINDOW))
                    bit = builder.shl(constant(Words, 1), distance)
                    sums.add(builder.select(inside, bit, constant(Words, 0)), 0)
                    far = builder.or_(far, builder.select(inside, constant(Words, 0), magnitude))
                    for c, cut in enumerate(cuts):
                        is_over = builder.icmp_unsigned("<", below, constant(Words, _MANTISSA - cut))
                        more = builder.add(beyond[c], constant(Words, 1))
                        beyond[c] = builder.select(is_over, more, beyond[c])
                for plane in range(planes.LOWER):
                    sums.add(code.load(here, plane * planes.ROW_BYTES), plane)
                    code.store(sums.total(plane), here, plane * planes.ROW_BYTES)
                code.store(sums.carries(), here, planes.LOWER * planes.ROW_BYTES)
                return [far, *beyond]

            far, *beyond = code.loop(turns, [constant(Words, 0)] * (1 + len(cuts)), body)
            for c, vector in enumerate(beyond):
                number = builder.zext(code.operation("vector.reduce.add", vector, result=I32), I64)
                place = code.place(over, 8 * c, I64)
                builder.store(builder.add(builder.load(place), number), place)
            return builder.zext(code.operation("vector.reduce.or", far, result=I32), I64)

        return types.int64(*[types.int64] * 6), generate

    return intrinsic(add)


def _transpose(context: Any, source: Any, row_bytes: Any, groups: Any, target: Any, target_bytes: Any) -> Any:
    """Transpose sixteen rows of ``groups`` times sixteen 32-bit words; both have a distance of rows in bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, row_bytes, groups, target, target_bytes = arguments
        code = Code(builder)

        def body(group: Any, _: list[Any]) -> list[Any]:
            start = builder.add(source, builder.mul(group, constant(I64, VECTOR_BYTES)))
            square = [code.load(builder.add(start, builder.mul(row_bytes, constant(I64, k))), 0) for k in range(LANES)]
            half = LANES // 2
            for _turn in range(4):
                # Interleave the halves of the rows, which moves one bit of a row's number to the lane's.
                square = [
                    _shuffled(builder, a, b, (first + k // 2 + k % 2 * LANES for k in range(LANES)))
                    for a, b in zip(square[:half], square[half:], strict=True)
                    for first in (0, half)
                ]
            rows = builder.add(target, builder.mul(builder.mul(group, constant(I64, LANES)), target_bytes))
            for k, row in enumerate(square):
                code.store(row, builder.add(rows, builder.mul(target_bytes, constant(I64, k))), 0)
            return []

        code.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


measure: Any = intrinsic(_measure)
sort: Any = intrinsic(_sort)
#: The second counts no values beyond the cuts: for blocks that have none.
add_vectors, add_low_vectors = _adder(_CUTS), _adder(())
transpose: Any = intrinsic(_transpose)


@compiled
def _place(array: Any) -> Any:
    return np.int64(array.ctypes.data)


# -- a tile ------------------------------------------------------------------------------------------------------------------


@compiled
def _take(tile: Any, k: Any, counts: Any) -> None:
    """Add what the planes k hold to the counts of distances below 32, and clear them."""
    state = tile.state[k]
    tile.planes[k, : planes.LOWER] = tile.lower[k, : planes.LOWER]
    tile.lower[k] = np.uint32(0)
    planes.take(tile.planes[k], state[1], tile.totals)
    for distance in range(planes.WINDOW):
        counts[distance] += np.int64(tile.totals[distance])
    state[1] = 0


@compiled
def _end_block(tile: Any, k: Any, counts: Any) -> None:
    """Carry from the lower planes k after sixteen turns."""
    planes.add_carries(tile.planes[k], tile.lower[k, planes.LOWER], tile.state[k, 1])
    tile.state[k, 0] = 0
    tile.state[k, 1] += 1
    if tile.state[k, 1] == planes.MOST_BLOCKS:
        _take(tile, k, counts)


@compiled
def _add_far(tile: Any, numbers: Any, counts: Any, powers: Any) -> None:
    """Count the values of these vectors with distances of 32 and more."""
    for number in numbers:
        limit = tile.limits[number]
        for magnitude in tile.magnitudes[LANES * number : LANES * (number + 1)]:
            distance = np.int64(np.uint32(limit - magnitude) >> np.uint32(_FIELD))
            if magnitude and distance >= planes.WINDOW:
                place = min(distance, DISTANCES - 1)
                counts[place] += 1
                # A power of two that is a subnormal, whose distance exceeds all bins.
                if magnitude <= np.uint32(_MANTISSA) and not magnitude & np.uint32(magnitude - np.uint32(1)):
                    powers[place] += 1


@compiled
def _add(tile: Any, k: Any, numbers: Any, turns: Any, over: Any, is_low: Any) -> Any:
    """Add vectors to the lower planes k; return non-zero if a value has a distance of 32 or more."""
    magnitudes, limits, listed = _place(tile.magnitudes), _place(tile.limits), _place(numbers)
    lower = _place(tile.lower[k]) + VECTOR_BYTES * tile.state[k, 0]
    if is_low:
        return add_low_vectors(magnitudes, limits, listed, turns, lower, _place(over))
    return add_vectors(magnitudes, limits, listed, turns, lower, _place(over))


@compiled
def _add_classes(tile: Any, kind: Any, counts: Any, over: Any) -> None:
    """Add the magnitudes of each class to its planes of a kind (0 values, 1 powers of two)."""
    for c in range(_CLASSES):
        k, numbers, length = kind * _CLASSES + c, tile.vectors[c], tile.lengths[c]
        # The vector of zeros fills the last turn.
        numbers[length : length + LANES] = np.int32(len(tile.limits) - 1)
        start, turns = np.int64(0), -(-length // LANES)
        while start < turns:
            now = min(turns - start, _TURNS - tile.state[k, 0])
            part = numbers[LANES * start : LANES * (start + now)]
            if _add(tile, k, part, now, over, c == 0):
                _add_far(tile, part, counts[kind, c], counts[1, c])
            tile.state[k, 0] += now
            if tile.state[k, 0] == _TURNS:
                _end_block(tile, k, counts[kind, c])
            start += now


@compiled
def _class(mantissa: Any) -> Any:
    found = 0
    for cut in _CUTS:
        found += np.int64(mantissa) > cut
    return found


@compiled
def _add_powers(tile: Any, counts: Any) -> None:
    """Count a tile's powers of two, but for those in blocks that are counted one by one."""
    found = np.int64(0)
    for word in tile.powers:
        found += ones(word)
    if found > _MANY_POWERS:
        for j in range(len(tile.magnitudes)):
            if tile.magnitudes[j] & np.uint32(_MANTISSA):
                tile.magnitudes[j] = np.uint32(0)
        _add_classes(tile, 1, counts, np.zeros(len(CUTS), np.int64))
        return
    for k in range(len(tile.powers)):
        word = tile.powers[k]
        while word:
            j = 64 * k + lowest_one(word)
            word = np.uint64(word & np.uint64(word - np.uint64(1)))
            top = tile.tops[j // LANES]
            if _LEAST_FIELD <= top >> np.uint32(_FIELD) < _BROKEN_FIELD:
                distance = np.int64(tile.limits[j // LANES] - tile.magnitudes[j]) >> _FIELD
                counts[1, _class(top & np.uint32(_MANTISSA)), min(distance, DISTANCES - 1)] += 1


@compiled
def _normalised(magnitude: Any) -> Any:
    """Return a doubled magnitude as if its exponent had no least value: exponent field, and 24 bits of mantissa."""
    field, mantissa = np.int64(magnitude) >> _FIELD, np.int64(magnitude) & _MANTISSA
    if field == 0:
        while mantissa <= _MANTISSA:
            mantissa <<= 1
            field -= 1
        # A subnormal has the exponent of field 1.
        return field + 1, mantissa & _MANTISSA
    return field, mantissa


@compiled
def _add_one_by_one(magnitudes: Any, top: Any, counts: Any, over: Any) -> None:
    """Count a block by exact exponents."""
    highest, mantissa = _normalised(top)
    c = _class(mantissa)
    for magnitude in magnitudes:
        if magnitude:
            field, mantissa = _normalised(magnitude)
            distance = min(highest - field, DISTANCES - 1)
            counts[0, c, distance] += 1
            counts[1, c, distance] += mantissa == 0
            for k in range(len(_CUTS)):
                over[k] += distance == 0 and mantissa > _CUTS[k]


@compiled
def _add_others(tile: Any, blocks: Any, vectors: Any, counts: Any, found: Any) -> None:
    """Count the blocks that belong to no class."""
    for block in range(blocks):
        top = tile.tops[block * vectors]
        field = top >> np.uint32(_FIELD)
        if field == _BROKEN_FIELD:
            found[_BROKEN] += 1
        elif top == 0:
            found[_ZERO] += 1
        elif field < _TINY_FIELD:
            found[_TINY] += 1
        elif field < _LEAST_FIELD:
            size = vectors * LANES
            _add_one_by_one(tile.magnitudes[block * size : (block + 1) * size], top, counts, found[_OVER:])


@compiled
def _counts_of(found: Any) -> Any:
    return found[:_OVER].reshape(2, _CLASSES, DISTANCES)


@compiled
def _add_tile(tile: Any, words: Any, blocks: Any, vectors: Any, found: Any) -> None:
    """Count blocks of so many vectors, from an address with words of whole groups of sixteen vectors."""
    groups = -(-blocks * vectors // LANES)
    counts = _counts_of(found)
    is_shared = vectors <= LANES and not vectors & (vectors - 1)
    near = vectors if is_shared else 1
    measure(words, _place(tile.magnitudes), _place(tile.tops), _place(tile.powers), groups, near)
    if not is_shared:
        for start in range(0, blocks * vectors, vectors):
            tile.tops[start : start + vectors] = tile.tops[start : start + vectors].max()
    others, found_powers = sort(
        _place(tile.tops),
        _place(tile.limits),
        _place(tile.vectors),
        4 * tile.vectors.shape[1],
        _place(tile.lengths),
        _place(tile.powers),
        groups,
    )
    _add_classes(tile, 0, counts, found[_OVER:])
    if others > groups * LANES - blocks * vectors:
        _add_others(tile, blocks, vectors, counts, found)
    if found_powers:
        tile.powers[groups * LANES // 4 :] = np.uint64(0)
        _add_powers(tile, counts)


# -- a tensor ----------------------------------------------------------------------------------------------------------------


@compiled
def _next_blocks(given: Any, first: Any, last: Any) -> Any:
    """Return the number of blocks of the next tile."""
    blocks = min(last - first, max(1, _TILE // given[_PADDED]))
    if given[_COLUMNS] == 1:
        # Columns of one row of blocks, sixteen at a time where possible.
        blocks = min(blocks, given[_WIDE] - first % given[_WIDE])
        blocks -= blocks % LANES if blocks > LANES else 0
    return blocks


@compiled
def _copy(given: Any, values: Any, first: Any, blocks: Any, tile: Any) -> None:
    """Copy blocks from the number ``first`` on into a tile, each padded."""
    columns, stride = given[_COLUMNS], given[_STRIDE]
    for k in range(blocks):
        at = (first + k) // given[_WIDE] * given[_ROWS] * stride + (first + k) % given[_WIDE] * columns
        target = k * given[_PADDED]
        for _row in range(given[_ROWS]):
            tile[target : target + columns] = values[at : at + columns]
            at, target = at + stride, target + columns
        tile[target : (k + 1) * given[_PADDED]] = values.dtype.type(0)


@compiled
def _transpose_columns(given: Any, values: Any, first: Any, blocks: Any, tile: Any, scratch: Any) -> None:
    """Copy blocks of one column into the tile's words."""
    rows, stride = given[_ROWS], given[_STRIDE]
    start = first // given[_WIDE] * rows * stride + first % given[_WIDE]
    source, step = _place(values) + 4 * start, 4 * stride
    if given[_BYTES] == 2:
        for row in range(rows):
            at = start + row * stride
            kernels.widen(values[at : at + blocks], given[_IS_BF16], tile.wide[row * blocks :], scratch)
        source, step = _place(tile.wide), 4 * blocks
    for row in range(0, rows, LANES):
        transpose(source + row * step, step, blocks // LANES, _place(tile.words) + 4 * row, 4 * rows)


@compiled
def _words_of(given: Any, values: Any, narrow: Any, first: Any, blocks: Any, tile: Any, scratch: Any) -> Any:
    """Return the address of blocks as float32 words, in memory or in the tile, with zeros up to a group of sixteen vectors.

    Args:
        narrow: the tile's array of elements like the values'.
    """
    elements, length = given[_ROWS] * given[_COLUMNS], blocks * given[_PADDED]
    is_narrow, is_padded = given[_BYTES] == 2, given[_PADDED] != elements
    is_dense = given[_ROWS] == 1 and given[_STRIDE] == given[_WIDE] * given[_COLUMNS] and not is_padded
    if is_dense and not is_narrow and length % planes.COLUMNS == 0:
        return _place(values) + 4 * first * elements
    if given[_COLUMNS] == 1 and blocks % LANES == 0 and not is_padded:
        _transpose_columns(given, values, first, blocks, tile, scratch)
    elif is_dense and is_narrow:
        kernels.widen(values[first * elements : first * elements + length], given[_IS_BF16], tile.words, scratch)
    else:
        _copy(given, values, first, blocks, narrow)
        if is_narrow:
            kernels.widen(narrow[:length], given[_IS_BF16], tile.words, scratch)
    tile.words[length : -(-length // planes.COLUMNS) * planes.COLUMNS] = np.uint32(0)
    return _place(tile.words)


@compiled
def _add_blocks(given: Any, first: Any, last: Any, tile: Any, counting: Any, found: Any) -> None:
    """Count the blocks of these numbers."""
    vectors = given[_PADDED] // LANES
    while first < last:
        blocks = _next_blocks(given, first, last)
        if given[_BYTES] == 2:
            halves = kernels.carray(pointer(given[_ADDRESS], np.uint16(0)), (_ALL,))
            words = _words_of(given, halves, tile.narrow, first, blocks, tile, counting.scratch)
        else:
            whole = kernels.carray(pointer(given[_ADDRESS], np.uint32(0)), (_ALL,))
            words = _words_of(given, whole, tile.words, first, blocks, tile, counting.scratch)
        if given[_EXPONENTS]:
            kernels.add_float32(counting, words, blocks * given[_PADDED])
        _add_tile(tile, words, blocks, vectors, found)
        first += blocks


def _work(address: Any) -> None:
    given = shares.carray(pointer(shares.job_at(address)[shares.VALUES], np.int64(0)), (_FIELDS,))
    own, found = shares.own_part(address), shares.result_of(address)
    owners = kernels.counting32(found[_ROW:]), _new_tile(given[_PADDED])
    counting, tile = kernels.without_owners(owners[0]), _without_owners(owners[1])
    start, length, turn = shares.next_values(address, own, 0)
    while length:
        first, last = start // given[_UNIT], (start + length) // given[_UNIT]
        _add_blocks(given, first, last, tile, counting, found)
        start, length, turn = shares.next_values(address, own, turn)
    kernels.finish32(owners[0])
    _finish(owners[1], _counts_of(found))


@compiled_for("void(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def _count(work: Any, given: Any, length: Any, found: Any, width: Any, threads: Any, team: Any) -> None:
    results = np.zeros((threads, width), np.int64)
    used = shares.run(work, given, length, results, team)
    total = shares.carray(pointer(found, np.int64(0)), (width,))
    total[:_ROW] = results[:used, :_ROW].sum(0)
    kernels.merge(results[:used, _ROW:], total[_ROW:])


@compiled
def _finish(tile: Any, counts: Any) -> None:
    """Count what the planes still hold."""
    for k in range(2 * _CLASSES):
        if tile.state[k, 0]:
            # No turn has filled the other columns.
            tile.lower[k, planes.LOWER, LANES * tile.state[k, 0] :] = np.uint32(0)
            _end_block(tile, k, counts[k // _CLASSES, k % _CLASSES])
        if tile.state[k, 1]:
            _take(tile, k, counts[k // _CLASSES, k % _CLASSES])


_WORK = function_of_c(_work)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def takes(values: torch.Tensor, size: tuple[int, int]) -> bool:
    """Return whether ``count`` can count a matrix in blocks of this size."""
    return (
        values.is_cpu and values.dtype in _DTYPES and math.prod(size) <= _MOST_ELEMENTS and not values._is_zerotensor()
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
    unit = min(1 << (padded - 1).bit_length(), _TILE)
    threads, team = threads_for(values.numel())
    given = np.zeros(_FIELDS, np.int64)
    given[_ADDRESS], given[_BYTES] = address(values), values.dtype.itemsize
    given[_IS_BF16], given[_EXPONENTS] = values.dtype is torch.bfloat16, row is not None
    given[_WIDE], given[_STRIDE] = wide // columns, values.stride(0) if high > 1 else wide
    given[_ROWS], given[_COLUMNS], given[_PADDED], given[_UNIT] = rows, columns, padded, unit
    found = np.empty(_ROW + NARROW.length, np.int64)
    _count(_WORK, given.ctypes.data, number * unit, found.ctypes.data, len(found), threads, team)
    if row is not None:
        found[_ROW + ZEROS] -= number * (padded - elements)
        row.copy_(merge_rows([row, torch.from_numpy(found[_ROW:])]))
    distances, powers = (tuple(map(tuple, each)) for each in found[:_OVER].reshape(2, _CLASSES, DISTANCES).tolist())
    *over, zero, broken, tiny = found[_OVER:_ROW].tolist()
    return BlockCounts(
        block,
        distances,
        powers,
        (over[0], over[1]),
        zeros=elements * (number - broken - tiny) - sum(map(sum, distances)),
        blocks=number,
        zero_blocks=zero,
        broken_blocks=broken,
        broken_elements=broken * elements,
        tiny_blocks=tiny,
        tiny_elements=tiny * elements,
    )
