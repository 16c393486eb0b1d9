"""Counts elements by their distance below their block's largest magnitude, with numba's loops; ``counting.blocks`` is the oracle.

A tile holds some blocks, sixteen elements to a vector, padded with zeros to whole vectors: in the tensor's memory where it is
laid out so, otherwise as a copy in the first-level cache. A value adds bit d of a word to ``planes``, d its distance. All
vectors are added to the planes of the lowest class, and those of the higher classes, which fewer blocks belong to, once more to
planes of their class; the lowest class is the difference. Tiles with a distance of 32 or more are added a second time, to planes
for those. Blocks whose largest magnitude is so small that subnormals lie within the planes' reach are counted one by one.

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
#: Elements whose exponents are counted before their blocks, where no copy is needed: they stay in the second-level cache.
_TOGETHER = 8 * _TILE
#: Magnitudes are doubled, so that the sign is shifted out: their mantissas have 24 bits.
_FIELD, _MANTISSA = 24, (1 << 24) - 1
_CUTS = tuple(int((cut - 1) * (1 << _FIELD)) for cut in CUTS)
#: Blocks with a largest magnitude of a lower exponent field are too small to be counted at all. Those outside the next two are
#: counted one by one: within these, neither a zero nor a value next to a limit of all ones has a bit in the planes.
_TINY_FIELD, _LEAST_FIELD, _MOST_FIELD, _BROKEN_FIELD = LOWEST_EXPONENT + 127, 64, 223, 255
_NO_LIMIT = (1 << 32) - 1
#: Lanes with powers of two in a tile from which they are added to planes, too: one by one they would take longer.
_MANY_POWERS = _TILE // 32
#: Sets of planes: of each kind, reach and class.
_KINDS, _REACHES = 2, 2
_SETS = _KINDS * _REACHES * _CLASSES
#: Rows of a set: lower planes and their carries, the other planes, and the state.
_UPPER = planes.LOWER + 1
_STATE = _UPPER + planes.ROWS
_SET_ROWS = _STATE + 1
_SET_BYTES = _SET_ROWS * planes.ROW_BYTES
#: Prefetch distance in bytes: as far as exponents are counted ahead of blocks.
_AHEAD = 4 * _TOGETHER
#: The lines of each sixteen that two passes prefetch. The pass that counts exponents prefetches the others: one pass alone would
#: wait for the memory, and the others would leave it idle.
_AHEAD_WHILE_MEASURING, _AHEAD_WHILE_ADDING = range(4), range(4, 12)
#: A number of elements that no tensor has.
_ALL = 1 << 48

#: The fields of the array that describes a tensor's blocks: address, bytes of an element, whether it is BF16; blocks in a row of
#: blocks; elements from one row to the next; rows, columns and padded elements of a block; the share of a job's length that
#: stands for a block; whether the exponents are counted.
_ADDRESS, _BYTES, _IS_BF16, _WIDE, _STRIDE, _ROWS, _COLUMNS, _PADDED, _UNIT, _EXPONENTS, _FIELDS = range(11)
#: The fields of a result: distances, then powers, by class; then these; then a row of exponents.
_OVER = _KINDS * _CLASSES * DISTANCES
_ZERO, _BROKEN, _TINY, _ROW = (_OVER + len(CUTS) + k for k in range(4))


class _Tile(NamedTuple):
    """Some blocks, and the planes of their distances: of each kind (values, powers of two), reach (below 32, from 32), class.

    Args:
        words: uint32, float32 values of whole vectors; ``narrow``, uint16, the same in 16 bits; ``wide``, uint32, rows.
        chosen: some of the words, zeros in place of the others.
        tops: uint32, the largest doubled magnitude in each vector's block; ``limits``: the same with all bits of the mantissa,
            or all ones for blocks that are not in the planes. Each ends with a vector of zeros.
        powers: uint16, for each group of sixteen vectors, the lanes with a power of two; ``masks``, uint64: those of each vector
            of a group.
        vectors: int32, shape (_CLASSES, ...): the numbers of all vectors, then of those of each higher class; ``ends``, uint32:
            their limits.
        listed: int64, shape (_CLASSES, 3): for each class, the addresses of these lists, and their length.
        sets: uint32, shape (_SETS, _SET_ROWS, planes.COLUMNS): lower planes with their carries, the other planes, and the state:
            as int64, the turns in the lower planes, and the blocks.
    """

    words: Any
    narrow: Any
    wide: Any
    chosen: Any
    tops: Any
    limits: Any
    powers: Any
    masks: Any
    vectors: Any
    ends: Any
    listed: Any
    sets: Any


@compiled
def _place(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@compiled
def _new_tile(padded: Any) -> Any:
    # Whole groups of sixteen vectors.
    size = -(-max(_TILE, padded) // planes.COLUMNS) * planes.COLUMNS
    vectors = size // LANES
    limits, numbers = np.zeros(vectors, np.uint32), np.zeros((_CLASSES, vectors + LANES), np.int32)
    numbers[0] = np.arange(vectors + LANES)
    ends, listed = np.zeros((_CLASSES, vectors + LANES), np.uint32), np.zeros((_CLASSES, 3), np.int64)
    for c in range(_CLASSES):
        listed[c, 0], listed[c, 1] = _place(numbers[c]), _place(ends[c]) if c else _place(limits)
    return _Tile(
        np.zeros(size, np.uint32),
        np.zeros(size, np.uint16),
        np.zeros(size, np.uint32),
        np.zeros(size, np.uint32),
        np.zeros(vectors, np.uint32),
        limits,
        np.zeros(vectors // LANES, np.uint16),
        np.zeros(planes.COLUMNS // 64, np.uint64),
        numbers,
        ends,
        listed,
        np.zeros((_SETS, _SET_ROWS, planes.COLUMNS), np.uint32),
    )


@compiled
def _without_owners(tile: Any) -> Any:
    """Return the tile as views that count no references; the caller keeps the tile."""
    return _Tile(
        kernels.without_owner(tile.words),
        kernels.without_owner(tile.narrow),
        kernels.without_owner(tile.wide),
        kernels.without_owner(tile.chosen),
        kernels.without_owner(tile.tops),
        kernels.without_owner(tile.limits),
        kernels.without_owner(tile.powers),
        kernels.without_owner(tile.masks),
        kernels.without_owner(tile.vectors),
        kernels.without_owner(tile.ends),
        kernels.without_owner(tile.listed),
        kernels.without_owner(tile.sets),
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


def _measure(context: Any, words: Any, tops: Any, groups: Any, vectors: Any, ahead: Any) -> Any:
    """Fill a tile's tops from its words, in groups of sixteen vectors.

    Args:
        vectors: neighbours that share their top, a power of two up to sixteen.
        ahead: address of the tensor's memory to prefetch meanwhile, as many bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, tops, groups, vectors, ahead = arguments
        code = Code(builder)

        def body(group: Any, _: list[Any]) -> list[Any]:
            offset = builder.mul(group, constant(I64, LANES * VECTOR_BYTES))
            source, later = builder.add(words, offset), builder.add(ahead, offset)
            found = []
            for k in range(LANES):
                value = code.load(source, k * VECTOR_BYTES)
                if k in _AHEAD_WHILE_MEASURING:
                    code.prefetch(later, k * VECTOR_BYTES, level=2)
                found.append(builder.add(value, value))
            top = _largest_of_each(code, found)
            for step in (1, 2, 4, 8):
                other = _shuffled(builder, top, top, (lane ^ step for lane in range(LANES)))
                is_shared = builder.icmp_signed(">", vectors, constant(I64, step))
                top = builder.select(is_shared, code.operation("umax", top, other), top)
            code.store(top, builder.add(tops, builder.mul(group, constant(I64, VECTOR_BYTES))), 0)
            return []

        code.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _sort(context: Any, tops: Any, limits: Any, listed: Any, groups: Any) -> Any:
    """Fill ``limits``, and list the vectors of each higher class with their limits, in groups of sixteen.

    Returns:
        (int64, int64): how many vectors are in the planes; how many have only zeros.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tops, limits, listed, groups = arguments
        code = Code(builder)

        lists = [[code.load(listed, 24 * (k + 1) + 8 * j, I64) for j in range(2)] for k in range(len(_CUTS))]

        def count(mask: Any) -> Any:
            return code.operation("ctpop", builder.zext(builder.bitcast(mask, I16), I64))

        def body(group: Any, state: list[Any]) -> list[Any]:
            inside, zeros, *places = state
            offset = builder.mul(group, constant(I64, VECTOR_BYTES))
            top = code.load(builder.add(tops, offset), 0)
            field = builder.sub(builder.lshr(top, constant(Words, _FIELD)), constant(Words, _LEAST_FIELD))
            is_inside = builder.icmp_unsigned("<=", field, constant(Words, _MOST_FIELD - _LEAST_FIELD))
            full = builder.or_(top, constant(Words, _MANTISSA))
            limit = builder.select(is_inside, full, constant(Words, _NO_LIMIT))
            code.store(limit, builder.add(limits, offset), 0)
            first = _splat(builder, builder.trunc(builder.mul(group, constant(I64, LANES)), I32))
            numbers = builder.add(first, _lanes(Words, range(LANES)))
            mantissa = builder.and_(top, constant(Words, _MANTISSA))
            new = []
            for k, (place, cut) in enumerate(zip(places, _CUTS, strict=True)):
                within = builder.and_(is_inside, builder.icmp_unsigned(">", mantissa, constant(Words, cut)))
                if k + 1 < len(_CUTS):
                    below = builder.icmp_unsigned("<=", mantissa, constant(Words, _CUTS[k + 1]))
                    within = builder.and_(within, below)
                at = builder.mul(place, constant(I64, 4))
                for each, target in zip((numbers, limit), lists[k], strict=True):
                    kept = code.operation("experimental.vector.compress", each, within, constant(Words, 0))
                    code.store(kept, builder.add(target, at), 0)
                new.append(builder.add(place, count(within)))
            is_zero = builder.icmp_unsigned("==", top, constant(Words, 0))
            return [builder.add(inside, count(is_inside)), builder.add(zeros, count(is_zero)), *new]

        inside, zeros, *places = code.loop(groups, [constant(I64, 0)] * (2 + len(_CUTS)), body)
        code.store(builder.mul(groups, constant(I64, LANES)), listed, 16)
        for k, place in enumerate(places):
            # Fill the last turn with vectors that have no bits in the planes.
            at = builder.mul(place, constant(I64, 4))
            code.store(constant(Words, 0), builder.add(lists[k][0], at), 0)
            code.store(constant(Words, _NO_LIMIT), builder.add(lists[k][1], at), 0)
            code.store(place, listed, 24 * (k + 1) + 16)
        return context.make_tuple(builder, signature.return_type, [inside, zeros])

    return types.UniTuple(types.int64, 2)(*[types.int64] * 4), generate


def _find_powers(context: Any, words: Any, masks: Any) -> Any:
    """Write a uint16 for each of sixteen vectors: the lanes with a power of two that is no subnormal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, zero = Code(builder), constant(Words, 0)
        for k in range(LANES):
            value = code.load(arguments[0], k * VECTOR_BYTES)
            magnitude = builder.add(value, value)
            rest = builder.and_(magnitude, constant(Words, _MANTISSA))
            is_power = builder.and_(
                builder.icmp_unsigned("==", rest, zero), builder.icmp_unsigned("!=", magnitude, zero)
            )
            code.store(builder.bitcast(is_power, I16), arguments[1], 2 * k)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _adder(way: str) -> Any:
    def add(context: Any, words: Any, numbers: Any, limits: Any, turns: Any, lower: Any, extra: Any, ahead: Any) -> Any:
        """Add listed vectors to the lower planes, sixteen a turn.

        Args:
            numbers, limits: addresses of the vectors' numbers, and of their limits.
            lower: address of the planes' first sixteen columns to fill; each turn fills the next sixteen.
            extra: with ALL, address of uint16s for the lanes with powers of two, one a turn; with HIGHER, of int64s, to which
                the numbers of values beyond each cut are added.
            ahead: with ALL, how many bytes after the words to prefetch.

        Returns:
            With ALL, non-zero if a value has a distance of 32 or more; with FAR, if a value is subnormal.
        """
        return types.int64(*[types.int64] * 7), lambda *arguments: _generate_add(way, *arguments)

    return intrinsic(add)


def _generate_add(way: str, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    words, numbers, limits, turns, lower, extra, ahead = arguments
    code, zero, one = Code(builder), constant(Words, 0), constant(Words, 1)

    def body(turn: Any, state: list[Any]) -> list[Any]:
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        listed, ends, here = (builder.add(each, offset) for each in (numbers, limits, lower))
        found, *beyond = state
        sums, powers = planes.Sums(code), zero
        for k in range(LANES):
            number = builder.zext(code.load(listed, 4 * k, I32), I64)
            place = builder.add(words, builder.mul(number, constant(I64, VECTOR_BYTES)))
            if way == ALL and k in _AHEAD_WHILE_ADDING:
                code.prefetch(builder.add(place, ahead), 0, level=2)
            value = code.load(place, 0)
            magnitude = builder.add(value, value)
            limit = _splat(builder, code.load(ends, 4 * k, I32))
            below = builder.sub(limit, magnitude)
            distance = builder.lshr(below, constant(Words, _FIELD))
            if way == FAR:
                is_subnormal = builder.icmp_unsigned("<=", magnitude, constant(Words, _MANTISSA))
                found = builder.or_(found, builder.select(is_subnormal, magnitude, zero))
                distance = code.operation("umin", distance, constant(Words, DISTANCES - 1))
                distance = builder.sub(distance, constant(Words, planes.WINDOW))
                is_none = builder.or_(
                    builder.icmp_unsigned("==", magnitude, zero),
                    builder.icmp_unsigned("==", limit, constant(Words, _NO_LIMIT)),
                )
                distance = builder.select(is_none, constant(Words, -1), distance)
            inside = builder.icmp_unsigned("<", distance, constant(Words, planes.WINDOW))
            sums.add(builder.select(inside, builder.shl(one, distance), zero), 0)
            if way == ALL:
                found = builder.or_(found, builder.select(inside, zero, magnitude))
                rest = builder.and_(magnitude, constant(Words, _MANTISSA))
                powers = builder.or_(powers, builder.select(builder.icmp_unsigned("==", rest, zero), magnitude, zero))
            for c, cut in enumerate(_CUTS[: len(beyond)]):
                is_over = builder.icmp_unsigned("<", below, constant(Words, _MANTISSA - cut))
                beyond[c] = builder.select(is_over, builder.add(beyond[c], one), beyond[c])
        for plane in range(planes.LOWER):
            sums.add(code.load(here, plane * planes.ROW_BYTES), plane)
            code.store(sums.total(plane), here, plane * planes.ROW_BYTES)
        code.store(sums.carries(), here, planes.LOWER * planes.ROW_BYTES)
        if way == ALL:
            lanes = builder.bitcast(builder.icmp_unsigned("!=", powers, zero), I16)
            code.store(lanes, builder.add(extra, builder.add(turn, turn)), 0)
        return [found, *beyond]

    counted = len(_CUTS) if way == HIGHER else 0
    found, *beyond = code.loop(turns, [zero] * (1 + counted), body)
    for c, vector in enumerate(beyond):
        total = builder.zext(code.operation("vector.reduce.add", vector, result=I32), I64)
        code.store(builder.add(code.load(extra, 8 * c, I64), total), extra, 8 * c)
    return builder.zext(code.operation("vector.reduce.or", found, result=I32), I64)


def _transpose(context: Any, source: Any, row_bytes: Any, groups: Any, target: Any, target_bytes: Any) -> Any:
    """Transpose sixteen rows of ``groups`` times sixteen 32-bit words; both have a distance of rows in bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, row_bytes, groups, target, target_bytes = arguments
        code = Code(builder)

        def body(group: Any, _: list[Any]) -> list[Any]:
            start = builder.add(source, builder.mul(group, constant(I64, VECTOR_BYTES)))
            rows = [builder.add(start, builder.mul(row_bytes, constant(I64, k))) for k in range(LANES)]
            for row in rows:
                # The next tile's columns of these rows.
                code.prefetch(builder.add(row, builder.mul(groups, constant(I64, VECTOR_BYTES))), 0)
            square = [code.load(row, 0) for row in rows]
            half = LANES // 2
            for _turn in range(4):
                # Interleave the halves of the rows, which moves one bit of a row's number to the lane's.
                square = [
                    _shuffled(builder, a, b, (first + k // 2 + k % 2 * LANES for k in range(LANES)))
                    for a, b in zip(square[:half], square[half:], strict=True)
                    for first in (0, half)
                ]
            place = builder.add(target, builder.mul(builder.mul(group, constant(I64, LANES)), target_bytes))
            for k, row in enumerate(square):
                code.store(row, builder.add(place, builder.mul(target_bytes, constant(I64, k))), 0)
            return []

        code.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


measure: Any = intrinsic(_measure)
sort: Any = intrinsic(_sort)
find_powers: Any = intrinsic(_find_powers)
#: All vectors of a tile, distances below 32; those of a higher class; either, distances from 32 on.
ALL, HIGHER, FAR = "all", "higher", "far"
add_all, add_higher, add_far = _adder(ALL), _adder(HIGHER), _adder(FAR)
transpose: Any = intrinsic(_transpose)


# -- a tile ------------------------------------------------------------------------------------------------------------------


@compiled
def _state_of(planes_at: Any) -> Any:
    """Return the state of the set of planes at an address."""
    return kernels.carray(pointer(planes_at + _STATE * planes.ROW_BYTES, np.int64(0)), (2,))


@compiled
def _rows_of(planes_at: Any) -> Any:
    return kernels.carray(pointer(planes_at, np.uint32(0)), (_SET_ROWS, planes.COLUMNS))


@compiled
def _take(planes_at: Any, counts_at: Any) -> None:
    """Add what a set of planes holds to the counts of 32 distances, and clear it."""
    rows, state = _rows_of(planes_at), _state_of(planes_at)
    rows[_UPPER : _UPPER + planes.LOWER] = rows[: planes.LOWER]
    rows[:_UPPER] = np.uint32(0)
    totals = np.zeros(planes.WINDOW, np.uint32)
    planes.take(rows[_UPPER:_STATE], state[1], totals)
    counts = kernels.carray(pointer(counts_at, np.int64(0)), (planes.WINDOW,))
    for distance in range(planes.WINDOW):
        counts[distance] += np.int64(totals[distance])
    state[1] = 0


@compiled
def _end_block(planes_at: Any, counts_at: Any) -> None:
    """Carry from a set's lower planes after sixteen turns."""
    state = _state_of(planes_at)
    upper, carries = planes_at + _UPPER * planes.ROW_BYTES, planes_at + planes.LOWER * planes.ROW_BYTES
    planes.add_carries(upper, carries, state[1])
    state[0] = 0
    state[1] += 1
    if state[1] == planes.MOST_BLOCKS:
        _take(planes_at, counts_at)


@compiled
def _set_number(kind: Any, reach: Any, c: Any) -> Any:
    return (kind * _REACHES + reach) * _CLASSES + c


@compiled
def _counts_place(found: Any, kind: Any, reach: Any, c: Any) -> Any:
    """Return the address of the 32 counts that belong to a set, given the address of a result."""
    return found + 8 * ((kind * _CLASSES + c) * DISTANCES + reach * planes.WINDOW)


# The functions for each tile take addresses: a call copies every field of a tuple of arrays.
@compiled
def _add_class(
    words: Any, ahead: Any, listed: Any, sets: Any, powers: Any, found: Any, kind: Any, reach: Any, c: Any
) -> Any:
    """Add the listed vectors of a class to its planes; return what the adders return.

    Args:
        words, sets, powers, found: addresses of the words, of the sets of planes, of the masks of powers, and of the result.
    """
    planes_at = sets + _SET_BYTES * _set_number(kind, reach, c)
    counts_at, state = _counts_place(found, kind, reach, c), _state_of(planes_at)
    numbers, ends, length = listed[c]
    seen, turns = np.int64(0), -(-length // LANES)
    while turns > 0:
        now = min(turns, _TURNS - state[0])
        lower = planes_at + VECTOR_BYTES * state[0]
        if reach:
            seen |= add_far(words, numbers, ends, now, lower, np.int64(0), np.int64(0))
        elif c:
            # Values beyond the cuts are not counted again among the powers of two, which never lie beyond.
            seen |= add_higher(words, numbers, ends, now, lower, found + 8 * _OVER, np.int64(0))
        else:
            seen |= add_all(words, numbers, ends, now, lower, powers, ahead)
        state[0] += now
        if state[0] == _TURNS:
            _end_block(planes_at, counts_at)
        numbers, ends, powers = numbers + VECTOR_BYTES * now, ends + VECTOR_BYTES * now, powers + 2 * now
        turns -= now
    return seen


@compiled
def _add_classes(words: Any, ahead: Any, listed: Any, sets: Any, powers: Any, found: Any, kind: Any) -> Any:
    """Add a tile's values, or powers of two, to the planes of all vectors and of each higher class.

    Returns:
        Non-zero if a value is subnormal.
    """
    is_far = _add_class(words, ahead, listed, sets, powers, found, kind, 0, 0)
    for c in range(1, _CLASSES):
        _add_class(words, ahead, listed, sets, powers, found, kind, 0, c)
    is_subnormal = np.int64(0)
    if is_far:
        for c in range(_CLASSES):
            is_subnormal |= _add_class(words, ahead, listed, sets, powers, found, kind, 1, c)
    return is_subnormal


@compiled
def _words_at(words: Any, tile: Any) -> Any:
    return kernels.carray(pointer(words, np.uint32(0)), (tile.listed[0, 2] * LANES,))


@compiled
def _class(mantissa: Any) -> Any:
    found = 0
    for cut in _CUTS:
        found += np.int64(mantissa) > cut
    return found


@compiled
def _add_power(top: Any, distance: Any, counts: Any) -> None:
    """Count a power of two as the planes do: among all, and in the class of its block's top if that is a higher one."""
    c = _class(top & np.uint32(_MANTISSA))
    counts[1, 0, distance] += 1
    if c:
        counts[1, c, distance] += 1


@compiled
def _add_subnormal_powers(tile: Any, words: Any, counts: Any) -> None:
    """Count the powers of two that are subnormals, whose distances exceed all bins."""
    values = _words_at(words, tile)
    for j in range(len(values)):
        magnitude = np.uint32(values[j] << np.uint32(1))
        if magnitude and magnitude <= np.uint32(_MANTISSA) and not magnitude & np.uint32(magnitude - np.uint32(1)):
            _add_power(tile.tops[j // LANES], DISTANCES - 1, counts)


@compiled
def _add_powers(tile: Any, words: Any, lanes: Any, found: Any) -> None:
    """Count a tile's powers of two that are no subnormals; ``lanes``: how many lanes have one."""
    values, counts = _words_at(words, tile), _counts_of(found)
    if lanes > _MANY_POWERS:
        for j in range(len(values)):
            is_power = not values[j] & np.uint32(_MANTISSA >> 1)
            tile.chosen[j] = values[j] if is_power else np.uint32(0)
        _add_classes(
            _place(tile.chosen),
            np.int64(0),
            tile.listed,
            _place(tile.sets),
            _place(tile.powers),
            _place(found),
            np.int64(1),
        )
        return
    masks = kernels.without_owner(tile.masks)
    for turn in range(len(values) // planes.COLUMNS):
        if tile.powers[turn]:
            find_powers(words + turn * planes.ROW_BYTES, _place(masks))
            for word in range(len(masks)):
                left = masks[word]
                while left:
                    j = planes.COLUMNS * turn + 64 * word + lowest_one(left)
                    left = np.uint64(left & np.uint64(left - np.uint64(1)))
                    distance = np.int64(tile.limits[j // LANES] - np.uint32(values[j] << np.uint32(1))) >> _FIELD
                    _add_power(tile.tops[j // LANES], min(distance, DISTANCES - 1), counts)


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
def _add_one_by_one(values: Any, top: Any, counts: Any, over: Any) -> None:
    """Count a block by exact exponents."""
    highest, mantissa = _normalised(top)
    c = _class(mantissa)
    for value in values:
        magnitude = np.uint32(value << np.uint32(1))
        if magnitude:
            field, mantissa = _normalised(magnitude)
            distance = min(highest - field, DISTANCES - 1)
            for each in range(0, c + 1, max(c, 1)):
                counts[0, each, distance] += 1
                counts[1, each, distance] += mantissa == 0
            for k in range(len(_CUTS)):
                over[k] += distance == 0 and mantissa > _CUTS[k]


@compiled
def _add_others(tile: Any, words: Any, blocks: Any, vectors: Any, counts: Any, found: Any) -> Any:
    """Count the blocks that are not in the planes; return the address of the words with zeros in their place."""
    size, values = vectors * LANES, _words_at(words, tile)
    for j in range(len(values)):
        tile.chosen[j] = values[j]
    for block in range(blocks):
        top = tile.tops[block * vectors]
        field = top >> np.uint32(_FIELD)
        if _LEAST_FIELD <= field <= _MOST_FIELD or top == 0:
            continue
        if field == _BROKEN_FIELD:
            found[_BROKEN] += 1
        elif field < _TINY_FIELD:
            found[_TINY] += 1
        else:
            _add_one_by_one(values[block * size : (block + 1) * size], top, counts, found[_OVER:])
        tile.chosen[block * size : (block + 1) * size] = np.uint32(0)
    return _place(tile.chosen)


@compiled
def _counts_of(found: Any) -> Any:
    return found[:_OVER].reshape(_KINDS, _CLASSES, DISTANCES)


@compiled
def _spread_tops(tops: Any, vectors: Any) -> None:
    """Replace the tops of each block's vectors by their largest."""
    for start in range(0, len(tops), vectors):
        block = tops[start : start + vectors]
        top = np.uint32(0)
        for each in block:
            top = max(top, each)
        block[:] = top


@compiled
def _add_tiles(tile: Any, words: Any, blocks: Any, vectors: Any, ahead: Any, found: Any) -> None:
    """Count blocks of so many vectors, from an address with words of whole groups of sixteen vectors, a tile at a time.

    Args:
        ahead: how many bytes after the words to prefetch meanwhile.
    """
    counts, most = _counts_of(found), max(_TILE // (LANES * vectors), 1)
    is_shared = vectors <= LANES and not vectors & (vectors - 1)
    tops, powers, found_at, sets = _place(tile.tops), _place(tile.powers), _place(found), _place(tile.sets)
    limits, listed = _place(tile.limits), _place(tile.listed)
    while blocks > 0:
        now = min(blocks, most)
        length, groups = now * vectors, -(-now * vectors // LANES)
        measure(words, tops, groups, vectors if is_shared else 1, words + ahead)
        if not is_shared:
            _spread_tops(tile.tops[:length], vectors)
        inside, zeros = sort(tops, limits, listed, groups)
        # The padding of the last group has only zeros, too.
        found[_ZERO] += (zeros - (groups * LANES - length)) // vectors
        counted = words
        if inside + zeros < groups * LANES:
            counted = _add_others(tile, words, now, vectors, counts, found)
        if inside:
            if _add_classes(counted, ahead, tile.listed, sets, powers, found_at, np.int64(0)):
                _add_subnormal_powers(tile, counted, counts)
            lanes = np.int64(0)
            for turn in range(groups):
                lanes += ones(np.uint64(tile.powers[turn]))
            if lanes:
                _add_powers(tile, counted, lanes, found)
        words, blocks = words + VECTOR_BYTES * length, blocks - now


# -- a tensor ----------------------------------------------------------------------------------------------------------------


@compiled
def _is_dense(given: Any) -> Any:
    """Return whether the blocks follow each other in memory without gaps or padding."""
    is_padded = given[_PADDED] != given[_ROWS] * given[_COLUMNS]
    return given[_ROWS] == 1 and given[_STRIDE] == given[_WIDE] * given[_COLUMNS] and not is_padded


@compiled
def _next_blocks(given: Any, first: Any, last: Any) -> Any:
    """Return the number of blocks of the next tile; of several tiles that need no copy."""
    most = max(1, _TILE // given[_PADDED])
    blocks = min(last - first, most)
    if _is_dense(given) and given[_BYTES] == 4 and _TILE % given[_PADDED] == 0:
        tiles = min((last - first) // most, _TOGETHER // _TILE)
        return tiles * most if tiles else blocks
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
            # numba copies slices element by element.
            row, source = tile[target : target + columns], values[at : at + columns]
            for j in range(len(row)):
                row[j] = source[j]
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
    is_narrow, is_padded, is_dense = given[_BYTES] == 2, given[_PADDED] != elements, _is_dense(given)
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
        is_copy = words == _place(tile.words)
        _add_tiles(tile, words, blocks, vectors, 0 if is_copy else _AHEAD, found)
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
    """Count what the planes still hold, and subtract the higher classes from all."""
    for kind in range(_KINDS):
        for reach in range(_REACHES):
            for c in range(_CLASSES):
                planes_at = _place(tile.sets[_set_number(kind, reach, c)])
                counts_at, state = _counts_place(_place(counts), kind, reach, c), _state_of(planes_at)
                if state[0]:
                    # No turn has filled the other columns.
                    _rows_of(planes_at)[planes.LOWER, LANES * state[0] :] = np.uint32(0)
                    _end_block(planes_at, counts_at)
                if state[1]:
                    _take(planes_at, counts_at)
    for c in range(1, _CLASSES):
        counts[:, 0] -= counts[:, c]


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
    distances, powers = (
        tuple(map(tuple, each)) for each in found[:_OVER].reshape(_KINDS, _CLASSES, DISTANCES).tolist()
    )
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
