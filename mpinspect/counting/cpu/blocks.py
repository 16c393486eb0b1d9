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
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba.types
import numpy as np
import torch
from llvmlite import ir

from mpinspect.counting.bits import merge_rows
from mpinspect.counting.cpu import kernels, planes, shares
from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.counter import address, threads_for
from mpinspect.counting.cpu.memory import pointer
from mpinspect.counting.cpu.vectors import I8, I16, I32, I64, LANES, VECTOR_BYTES, Code, Words, constant, emitted
from mpinspect.counting.layout import NARROW, ZEROS
from mpinspect.numeric.blocks import CUTS, DISTANCES, LOWEST_EXPONENT, BlockCounts

types: Any = numba.types

_CLASSES, _TURNS = len(CUTS) + 1, planes.COLUMNS // LANES
#: Elements of a tile, unless a block has more; and those of the largest block.
_TILE, _MOST_ELEMENTS = 8192, 1 << 16
#: Elements whose exponents, if they are counted apart, are counted before their blocks, where no copy is needed: they stay in the
#: second-level cache.
_TOGETHER = 4 * _TILE
#: Magnitudes are doubled, so that the sign is shifted out: their mantissas have 24 bits.
_FIELD, _MANTISSA = 24, (1 << 24) - 1
_CUTS = tuple(int((cut - 1) * (1 << _FIELD)) for cut in CUTS)
#: A bit of listed edges that are no powers of two.
_NEAR_NEXT = 1 << 16
#: The largest ``_edge_key`` of an edge, whose significand is 1, or at least 2 - 2^-11.
_EDGE = 1 << (32 - 11)
#: Blocks with a largest magnitude of a lower exponent field are too small to be counted at all. Those outside the next two are
#: counted one by one: within these, neither a zero nor a value next to a limit of all ones has a bit in the planes.
_TINY_FIELD, _LEAST_FIELD, _MOST_FIELD, _BROKEN_FIELD = LOWEST_EXPONENT + 127, 64, 191, 255
_NO_LIMIT = (1 << 32) - 1
#: Sets of planes: of each reach (distances below 32, and up to 63) and class; then of 32 exponents of largest magnitudes each.
_REACHES, _WINDOWS = 2, 8
#: The last set: of exponents.
_EXPONENT_SET = _REACHES * _CLASSES + _WINDOWS
_SETS = _EXPONENT_SET + 1
#: Rows of a set: lower planes and their carries, the other planes, and the state.
_UPPER = planes.LOWER + 1
_STATE = _UPPER + planes.ROWS
_SET_ROWS = _STATE + 1
_SET_BYTES = _SET_ROWS * planes.ROW_BYTES
#: Prefetch distance in bytes: a tile. The pass over listed vectors prefetches, since it takes longest: the memory is never idle.
_AHEAD = 4 * _TILE
#: A number of elements that no tensor has.
_ALL = 1 << 48

#: The fields of the array that describes a tensor's blocks: address, bytes of an element, whether it is BF16; blocks in a row of
#: blocks; elements from one row to the next; rows, columns and padded elements of a block; the share of a job's length that
#: stands for a block; whether the exponents are counted.
_ADDRESS, _BYTES, _IS_BF16, _WIDE, _STRIDE, _ROWS, _COLUMNS, _PADDED, _UNIT, _EXPONENTS, _FIELDS = range(11)
#: Copies of counters: neighbouring values, which often share a counter, add to different copies.
_COPIES = 4
#: The fields of a result: distances by class, then powers; vectors by the exponent field of their block's largest magnitude, from
#: the highest one on, and the zeros in them by this field; then these; then a row of exponents.
_KINDS = 2
_MAXIMA = _KINDS * _CLASSES * DISTANCES
_ZEROS = _MAXIMA + _WINDOWS * planes.WINDOW
_OVER = _ZEROS + _WINDOWS * planes.WINDOW
_ZERO = _OVER + len(CUTS)
_ROW = _ZERO + 1
#: The fields of a tile's ``window``, and the place of its first count.
_LOWEST, _ELEMENTS, _IS_APART, _IN_WINDOW = range(4)


class _Tile(NamedTuple):
    """Some blocks, and the planes of their distances.

    Args:
        words: uint32, float32 values of whole vectors; ``narrow``, uint16, the same in 16 bits; ``wide``, uint32, rows.
        chosen: some of the words, zeros in place of the others; ``places``, uint32, a tile's edges.
        tops: uint32, the largest doubled magnitude in each vector's block; ``halves``, half of it. ``zeros``, uint8, the zeros in
            each vector.
        numbers: int32, shape (_CLASSES, ...): the numbers of the vectors in each class; ``limits``, uint32: their tops with all
            bits of the mantissa; ``edges``, uint16: for each sixteen of these vectors, the lanes with an edge.
        listed: int64, shape (_CLASSES, 4): for each class, the addresses of these lists, and the number of vectors.
        windows: uint32, shape (_WINDOWS, ...): the limit of each window of maxima, repeated; ``order``, int32: 0, 1, 2, ...
        sets: uint32, shape (_SETS, _SET_ROWS, planes.COLUMNS): lower planes with their carries, the other planes, and the state:
            as int64, the turns in the lower planes, and the blocks.
        found_zeros: int64, shape (_COPIES, 256): counters of zeros by the exponent field of their block's largest magnitude;
            ``found_powers``, shape (_COPIES, _CLASSES * DISTANCES): of powers of two.
        window: int64: the lowest exponent field in the planes of exponents; the elements counted there, zeros included; whether
            the last tile did not fit; then 32 counts.
    """

    words: Any
    narrow: Any
    wide: Any
    chosen: Any
    places: Any
    tops: Any
    halves: Any
    zeros: Any
    numbers: Any
    limits: Any
    edges: Any
    listed: Any
    windows: Any
    order: Any
    sets: Any
    found_zeros: Any
    found_powers: Any
    window: Any


@compiled
def _place(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@compiled
def _aligned(array: Any) -> Any:
    """Return a line's number of elements less, from a line's begin on: a load waits for a store that crosses lines."""
    start = -_place(array) % VECTOR_BYTES // array.itemsize
    return array[start : start + len(array) - VECTOR_BYTES]


@compiled
def _new_tile(padded: Any) -> Any:
    # Whole groups of sixteen vectors.
    size = -(-max(_TILE, padded) // planes.COLUMNS) * planes.COLUMNS
    vectors = size // LANES
    listed, width = np.zeros((_CLASSES, 4), np.int64), vectors + LANES
    numbers = _aligned(np.zeros(_CLASSES * width + VECTOR_BYTES, np.int32))
    limits = _aligned(np.zeros(_CLASSES * width + VECTOR_BYTES, np.uint32))
    edges = np.zeros((_CLASSES, width // LANES), np.uint16)
    for c in range(_CLASSES):
        listed[c, 0], listed[c, 1] = _place(numbers[c * width :]), _place(limits[c * width :])
        listed[c, 2] = _place(edges[c])
    turns = -(-vectors // planes.COLUMNS)
    windows = np.zeros((_WINDOWS, turns * LANES), np.uint32)
    for window in range(_WINDOWS):
        windows[window] = np.uint32(((_WINDOWS - window) * planes.WINDOW << _FIELD) - 1)
    return _Tile(
        _aligned(np.zeros(size + VECTOR_BYTES, np.uint32)),
        np.zeros(size, np.uint16),
        np.zeros(size, np.uint32),
        _aligned(np.zeros(size + VECTOR_BYTES, np.uint32)),
        np.zeros(size + LANES, np.uint32),
        _aligned(np.zeros(vectors + VECTOR_BYTES, np.uint32)),
        _aligned(np.zeros(turns * planes.COLUMNS + VECTOR_BYTES, np.uint32)),
        np.zeros(vectors, np.uint8),
        numbers,
        limits,
        edges,
        listed,
        windows,
        np.arange(turns * LANES).astype(np.int32),
        _aligned(np.zeros(_SETS * _SET_BYTES // 4 + VECTOR_BYTES, np.uint32)),
        np.zeros((_COPIES, _WINDOWS * planes.WINDOW), np.int64),
        np.zeros((_COPIES, _CLASSES * DISTANCES), np.int64),
        np.zeros(_IN_WINDOW + planes.WINDOW, np.int64),
    )


@compiled
def _without_owners(tile: Any) -> Any:
    """Return the tile as views that count no references; the caller keeps the tile."""
    return _Tile(
        kernels.without_owner(tile.words),
        kernels.without_owner(tile.narrow),
        kernels.without_owner(tile.wide),
        kernels.without_owner(tile.chosen),
        kernels.without_owner(tile.places),
        kernels.without_owner(tile.tops),
        kernels.without_owner(tile.halves),
        kernels.without_owner(tile.zeros),
        kernels.without_owner(tile.numbers),
        kernels.without_owner(tile.limits),
        kernels.without_owner(tile.edges),
        kernels.without_owner(tile.listed),
        kernels.without_owner(tile.windows),
        kernels.without_owner(tile.order),
        kernels.without_owner(tile.sets),
        kernels.without_owner(tile.found_zeros),
        kernels.without_owner(tile.found_powers),
        kernels.without_owner(tile.window),
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


@emitted(types.int64, *[types.int64] * 4)
def measure(code: Code, words: Any, tops: Any, groups: Any, vectors: Any) -> Any:
    """Fill a tile's tops from its words, in groups of sixteen vectors; return the least doubled magnitude (int64).

    Args:
        vectors: neighbours that share their top, a power of two up to sixteen.
    """
    builder = code.builder

    def body(group: Any, state: list[Any]) -> list[Any]:
        offset = builder.mul(group, constant(I64, LANES * VECTOR_BYTES))
        source = builder.add(words, offset)
        found, least = [], state[0]
        for k in range(LANES):
            value = code.load(source, k * VECTOR_BYTES)
            found.append(builder.add(value, value))
            least = code.operation("umin", least, found[-1])
        top = _largest_of_each(code, found)
        for step in (1, 2, 4, 8):
            other = _shuffled(builder, top, top, (lane ^ step for lane in range(LANES)))
            is_shared = builder.icmp_signed(">", vectors, constant(I64, step))
            top = builder.select(is_shared, code.operation("umax", top, other), top)
        code.store(top, builder.add(tops, builder.mul(group, constant(I64, VECTOR_BYTES))), 0)
        return [least]

    (least,) = code.loop(groups, [constant(Words, _NO_LIMIT)], body)
    return builder.zext(code.operation("vector.reduce.umin", least, result=I32), I64)


@emitted(types.int64, *[types.int64] * 3)
def count_zeros(code: Code, words: Any, zeros: Any, vectors: Any) -> Any:
    """Write the number of zeros in each vector (uint8); return the least doubled magnitude that is not zero, or 2^32 (int64)."""
    builder = code.builder

    def body(k: Any, state: list[Any]) -> list[Any]:
        value = code.load(builder.add(words, builder.mul(k, constant(I64, VECTOR_BYTES))), 0)
        magnitude = builder.add(value, value)
        is_zero = builder.icmp_unsigned("==", magnitude, constant(Words, 0))
        code.store(builder.trunc(_ones(code, is_zero), I8), builder.add(zeros, k), 0)
        # Zero minus one is the largest word.
        return [code.operation("umin", state[0], builder.sub(magnitude, constant(Words, 1)))]

    (least,) = code.loop(vectors, [constant(Words, _NO_LIMIT)], body)
    least = builder.zext(code.operation("vector.reduce.umin", least, result=I32), I64)
    return builder.add(least, constant(I64, 1))


def _ones(code: Code, mask: Any) -> Any:
    """Return the number of a mask's set lanes (int64)."""
    return code.operation("ctpop", code.builder.zext(code.builder.bitcast(mask, I16), I64))


def _kept(code: Code, lanes: Any, mask: Any, target: Any) -> None:
    """Write the lanes of a mask, without gaps, and some more lanes of any content."""
    code.store(code.operation("experimental.vector.compress", lanes, mask, constant(Words, 0)), target, 0)


@emitted(types.UniTuple(types.int64, 4), *[types.int64] * 4)
def sort(code: Code, tops: Any, halves: Any, listed: Any, groups: Any) -> Any:
    """List the vectors of each class with their limits, in groups of sixteen, and write half of the tops, the magnitudes.

    Returns:
        UniTuple(int64, 4): how many vectors are in the planes; the least top that is not zero, or 2^32; the highest top; how many
        vectors have only zeros.
    """
    builder = code.builder
    lists = [[code.load(listed, 32 * c + 8 * j, I64) for j in range(2)] for c in range(_CLASSES)]

    def body(group: Any, state: list[Any]) -> list[Any]:
        least, highest, zeros, *places = state
        offset = builder.mul(group, constant(I64, VECTOR_BYTES))
        top = code.load(builder.add(tops, offset), 0)
        code.store(builder.lshr(top, constant(Words, 1)), builder.add(halves, offset), 0)
        field = builder.sub(builder.lshr(top, constant(Words, _FIELD)), constant(Words, _LEAST_FIELD))
        is_inside = builder.icmp_unsigned("<=", field, constant(Words, _MOST_FIELD - _LEAST_FIELD))
        least = code.operation("umin", least, builder.sub(top, constant(Words, 1)))
        highest = code.operation("umax", highest, top)
        limit = builder.or_(top, constant(Words, _MANTISSA))
        first = _splat(builder, builder.trunc(builder.mul(group, constant(I64, LANES)), I32))
        numbers = builder.add(first, _lanes(Words, range(LANES)))
        mantissa = builder.and_(top, constant(Words, _MANTISSA))
        above = [builder.icmp_unsigned(">", mantissa, constant(Words, cut)) for cut in _CUTS]
        for c in range(_CLASSES):
            within = builder.and_(is_inside, above[c - 1]) if c else is_inside
            if c < len(_CUTS):
                within = builder.and_(within, builder.not_(above[c]))
            at = builder.mul(places[c], constant(I64, 4))
            for each, target in zip((numbers, limit), lists[c], strict=True):
                _kept(code, each, within, builder.add(target, at))
            places[c] = builder.add(places[c], _ones(code, within))
        is_zero = builder.icmp_unsigned("==", top, constant(Words, 0))
        return [least, highest, builder.add(zeros, _ones(code, is_zero)), *places]

    first = [constant(Words, _NO_LIMIT), constant(Words, 0), *[constant(I64, 0)] * (1 + _CLASSES)]
    least, highest, zeros, *places = code.loop(groups, first, body)
    inside = constant(I64, 0)
    for c, place in enumerate(places):
        # Fill the last turn with vectors that have no bits in the planes.
        at = builder.mul(place, constant(I64, 4))
        code.store(constant(Words, 0), builder.add(lists[c][0], at), 0)
        code.store(constant(Words, _NO_LIMIT), builder.add(lists[c][1], at), 0)
        code.store(place, listed, 32 * c + 24)
        inside = builder.add(inside, place)
    least = builder.zext(code.operation("vector.reduce.umin", least, result=I32), I64)
    highest = builder.zext(code.operation("vector.reduce.umax", highest, result=I32), I64)
    return [inside, builder.add(least, constant(I64, 1)), highest, zeros]


def _vector(code: Code, words: Any, numbers: Any, limits: Any, k: int) -> tuple[Any, Any]:
    """Return the doubled magnitudes of a listed vector, and its limit in every lane."""
    builder = code.builder
    number = builder.zext(code.load(numbers, 4 * k, I32), I64)
    value = code.load(builder.add(words, builder.mul(number, constant(I64, VECTOR_BYTES))), 0)
    return builder.add(value, value), _splat(builder, code.load(limits, 4 * k, I32))


def _is_power(builder: Any, magnitude: Any) -> Any:
    """Return which magnitudes have no mantissa: zeros, and powers of two that are no subnormals."""
    return builder.icmp_unsigned("==", builder.and_(magnitude, constant(Words, _MANTISSA)), constant(Words, 0))


@emitted(types.int64, *[types.int64] * 4)
def count_beyond(code: Code, words: Any, numbers: Any, limits: Any, vectors: Any) -> Any:
    """Return how many values in listed vectors have a distance beyond the planes, 64 or more (int64)."""
    builder = code.builder

    def body(k: Any, state: list[Any]) -> list[Any]:
        offset = builder.mul(k, constant(I64, 4))
        magnitude, limit = _vector(code, words, builder.add(numbers, offset), builder.add(limits, offset), 0)
        is_far = builder.icmp_unsigned(">=", builder.sub(limit, magnitude), constant(Words, DISTANCES << _FIELD))
        nonzero = builder.icmp_unsigned("!=", magnitude, constant(Words, 0))
        return [builder.add(state[0], _ones(code, builder.and_(is_far, nonzero)))]

    return code.loop(vectors, [constant(I64, 0)], body)[0]


@emitted(types.int64, *[types.int64] * 6)
def list_edges(code: Code, words: Any, numbers: Any, limits: Any, vectors: Any, first: Any, target: Any) -> Any:
    """Write the powers of two in listed vectors, and the values near the next one, as edges (uint32).

    An edge has three bytes: ``first`` plus the distance, at most the last bin; the exponent field; 1 if no power of two.

    Returns:
        int64: their number; subnormals are left out. Up to a vector more is written.
    """
    builder = code.builder
    start = _splat(builder, builder.trunc(first, I32))

    def body(k: Any, state: list[Any]) -> list[Any]:
        offset = builder.mul(k, constant(I64, 4))
        magnitude, limit = _vector(code, words, builder.add(numbers, offset), builder.add(limits, offset), 0)
        below = builder.sub(limit, magnitude)
        distance = builder.lshr(below, constant(Words, _FIELD))
        place = builder.add(start, code.operation("umin", distance, constant(Words, DISTANCES - 1)))
        field = builder.shl(builder.lshr(magnitude, constant(Words, _FIELD)), constant(Words, 8))
        is_power = _is_power(builder, magnitude)
        kind = builder.select(is_power, constant(Words, 0), constant(Words, _NEAR_NEXT))
        is_edge = builder.icmp_unsigned(">", magnitude, constant(Words, _MANTISSA))
        is_edge = builder.and_(is_edge, builder.icmp_unsigned("<=", _edge_key(builder, below), constant(Words, _EDGE)))
        edge = builder.or_(builder.or_(place, field), kind)
        _kept(code, edge, is_edge, builder.add(target, builder.mul(state[0], constant(I64, 4))))
        return [builder.add(state[0], _ones(code, is_edge))]

    return code.loop(vectors, [constant(I64, 0)], body)[0]


def _edge_key(builder: Any, below: Any) -> Any:
    """Return words, made of a limit minus magnitudes, of at most _EDGE for zeros, powers of two and values near the next one."""
    return builder.shl(builder.add(below, constant(Words, 1)), constant(Words, 32 - _FIELD))


class _Way(NamedTuple):
    """How vectors are added to planes: whether their class is a higher one; whether exponents are added, too; or both not, and
    single values are not looked at."""

    higher: bool = False
    exponents: bool = False
    plain: bool = False


def _adder(way: _Way) -> Any:
    return emitted(types.int64, *[types.int64] * 10)(partial(_emit_add, way))


def _emit_add(
    way: _Way,
    code: Code,
    words: Any,
    numbers: Any,
    limits: Any,
    turns: Any,
    lower: Any,
    edges: Any,
    over: Any,
    ahead: Any,
    exponents: Any,
    lowest: Any,
) -> Any:
    """Add listed vectors to the lower planes, sixteen a turn.

    Args:
        numbers, limits: addresses of the vectors' numbers, and of their limits.
        lower: address of the first sixteen columns to fill; each turn fills the next sixteen.
        edges: address of uint16s for the lanes with edges, one a turn. If ``way`` is plain: the distance of the first bit.
        over: where ``way`` is higher, address of int64s, to which the numbers of values beyond each cut are added.
        ahead: address to prefetch from, as many lines as there are vectors, unless ``way`` is plain.
        exponents: address of the first sixteen columns of the lower planes of exponents, if ``way`` adds to them.
        lowest: their lowest exponent field.

    Returns:
        int64, non-zero if an edge was found: a power of two, or a value near the next one.
    """
    builder, zero, one = code.builder, constant(Words, 0), constant(Words, 1)
    left, right = _shift(code, "l"), _shift(code, "r")
    first = _splat(builder, builder.trunc(builder.shl(edges, constant(I64, _FIELD)), I32))
    lowest_field = _splat(builder, builder.trunc(lowest, I32))
    starts = code.memory()

    def body(turn: Any, state: list[Any]) -> list[Any]:
        any_edge, *beyond = state
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        listed, ends = builder.add(numbers, offset), builder.add(limits, offset)
        later = builder.add(ahead, builder.mul(offset, constant(I64, LANES)))
        sums, exponent_sums, least = planes.Sums(code), planes.Sums(code), constant(Words, _NO_LIMIT)
        if way.exponents:
            fields = builder.lshr(code.load(ends, 0), constant(Words, _FIELD))
            code.store(left(one, builder.sub(fields, lowest_field)), starts, 0)
        for k in range(LANES):
            if not way.plain:
                code.prefetch(later, k * VECTOR_BYTES, level=2)
            magnitude, limit = _vector(code, words, listed, ends, k)
            below = builder.sub(limit, magnitude)
            if way.plain:
                below = builder.sub(below, first)
            else:
                nonzero = builder.icmp_unsigned("!=", magnitude, zero)
                least = builder.select(nonzero, code.operation("umin", least, _edge_key(builder, below)), least)
            for c, cut in enumerate(_CUTS[: len(beyond)]):
                is_over = builder.icmp_unsigned("<", below, constant(Words, _MANTISSA - cut))
                beyond[c] = builder.add(beyond[c], _ones(code, is_over))
            distance = builder.lshr(below, constant(Words, _FIELD))
            sums.add(left(one, distance), 0)
            if way.exponents:
                exponent_sums.add(right(_splat(builder, code.load(starts, 4 * k, I32)), distance), 0)
        for total, columns in ((sums, lower), (exponent_sums, exponents))[: 1 + way.exponents]:
            total.store(builder.add(columns, offset), builder.add(columns, offset))
        is_edge = builder.icmp_unsigned("<=", least, constant(Words, _EDGE))
        if not way.plain:
            code.store(builder.bitcast(is_edge, I16), builder.add(edges, builder.add(turn, turn)), 0)
        return [builder.or_(any_edge, builder.zext(is_edge, Words)), *beyond]

    any_edge, *beyond = code.loop(turns, [zero, *[constant(I64, 0)] * (len(_CUTS) * way.higher)], body)
    for c, total in enumerate(beyond):
        code.store(builder.add(code.load(over, 8 * c, I64), total), over, 8 * c)
    return builder.zext(code.operation("vector.reduce.or", any_edge, result=I32), I64)


def _shift(code: Code, side: str) -> Callable[[Any, Any], Any]:
    """Return a function that shifts words to the left ("l") or right ("r") by numbers of bits; from 32 on they are zero."""
    builder = code.builder

    def by_shift(words: Any, number: Any) -> Any:
        inside = builder.icmp_unsigned("<", number, constant(Words, planes.WINDOW))
        return builder.select(inside, {"l": builder.shl, "r": builder.lshr}[side](words, number), constant(Words, 0))

    def by_instruction(words: Any, number: Any) -> Any:
        return code.operation(f"x86.avx512.ps{side}lv.d", words, number, suffix="512")

    _, _, features = code.context.codegen().magic_tuple()
    # Its shift has this very result, but LLVM compares all the same.
    return by_instruction if "+avx512f" in features.split(",") else by_shift


@emitted(types.void, *[types.int64] * 5)
def transpose(code: Code, source: Any, row_bytes: Any, groups: Any, target: Any, target_bytes: Any) -> Any:
    """Transpose sixteen rows of ``groups`` times sixteen 32-bit words; both have a distance of rows in bytes."""
    builder = code.builder

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


add_plain, add_lowest, add_higher = _adder(_Way(plain=True)), _adder(_Way()), _adder(_Way(higher=True))
add_lowest_exponents, add_higher_exponents = _adder(_Way(exponents=True)), _adder(_Way(higher=True, exponents=True))


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
def _empty(planes_at: Any, counts_at: Any) -> None:
    """Add all that a set of planes holds to the counts, and clear it."""
    state = _state_of(planes_at)
    if state[0]:
        # No turn has filled the other columns.
        _rows_of(planes_at)[planes.LOWER, LANES * state[0] :] = np.uint32(0)
        _end_block(planes_at, counts_at)
    if state[1]:
        _take(planes_at, counts_at)


@compiled
def _planes_place(sets: Any, number: Any) -> Any:
    """Return the address of a set of planes."""
    return sets + _SET_BYTES * number


@compiled
def _counts_place(found: Any, number: Any) -> Any:
    """Return the address of the 32 counts that belong to a set, given the address of a result."""
    if number >= _REACHES * _CLASSES:
        return found + 8 * (_MAXIMA + (number - _REACHES * _CLASSES) * planes.WINDOW)
    return found + 8 * (number % _CLASSES * DISTANCES + number // _CLASSES * planes.WINDOW)


# The functions for each tile take addresses: a call copies every field of a tuple of arrays.
@compiled
def _add_listed(
    words: Any,
    numbers: Any,
    limits: Any,
    length: Any,
    sets: Any,
    number: Any,
    edges: Any,
    found: Any,
    ahead: Any,
    window: Any,
) -> Any:
    """Add listed vectors to the set of planes of this number; return what the adders return.

    Args:
        sets, found: addresses of the sets of planes, and of the result. The others are the adders'.
        window: address of the tile's window if exponents are added too, or 0.
    """
    planes_at, over, exponents_at = _planes_place(sets, number), found + 8 * _OVER, _planes_place(sets, _EXPONENT_SET)
    state, exponents, lowest = _state_of(planes_at), _state_of(exponents_at), np.int64(0)
    seen, turns = np.int64(0), -(-length // LANES)
    if window:
        lowest = _window_at(window)[_LOWEST]
    while turns > 0:
        now = min(turns, _TURNS - state[0])
        lower, others = planes_at + VECTOR_BYTES * state[0], exponents_at + VECTOR_BYTES * exponents[0]
        if window:
            now = min(now, _TURNS - exponents[0])
            if number:
                seen |= add_higher_exponents(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
            else:
                seen |= add_lowest_exponents(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
            exponents[0] += now
            if exponents[0] == _TURNS:
                _end_block(exponents_at, window + 8 * _IN_WINDOW)
        elif number >= _CLASSES:
            add_plain(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        elif number:
            seen |= add_higher(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        else:
            seen |= add_lowest(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        state[0] += now
        if state[0] == _TURNS:
            _end_block(planes_at, _counts_place(found, number))
        numbers, limits, turns = numbers + VECTOR_BYTES * now, limits + VECTOR_BYTES * now, turns - now
        if number < _CLASSES:
            edges, ahead = edges + 2 * now, ahead + LANES * VECTOR_BYTES * now
    return seen


@compiled
def _add_classes(words: Any, ahead: Any, listed: Any, sets: Any, found: Any, most: Any, window: Any) -> Any:
    """Add a tile's listed vectors to the planes; return non-zero if they have edges.

    Args:
        words, ahead, sets: addresses of the words, of as many lines to prefetch, and of the sets of planes.
        found: int64, the result.
        most: the largest distance that is possible.
        window: address of the tile's window if exponents are added too, or 0.
    """
    has_edges, found_at = np.int64(0), _place(found)
    for c in range(_CLASSES):
        numbers, limits, edges, length = listed[c]
        has_edges |= _add_listed(words, numbers, limits, length, sets, c, edges, found_at, ahead, window)
        if most >= planes.WINDOW:
            first, none = np.int64(planes.WINDOW), np.int64(0)
            _add_listed(words, numbers, limits, length, sets, _CLASSES + c, first, found_at, ahead, none)
        if most >= DISTANCES and length:
            found[c * DISTANCES + DISTANCES - 1] += count_beyond(words, numbers, limits, length)
        ahead += VECTOR_BYTES * length
    return has_edges


@compiled
def _window_at(window: Any) -> Any:
    """Return the window at an address."""
    return kernels.carray(pointer(window, np.int64(0)), (_IN_WINDOW + planes.WINDOW,))


@compiled
def _empty_window(sets: Any, window: Any, row: Any) -> None:
    """Add the exponents in the planes to a row, and clear the planes.

    Args:
        sets: address of the sets of planes.
    """
    _empty(_planes_place(sets, _EXPONENT_SET), _place(window) + 8 * _IN_WINDOW)
    counts = window[_IN_WINDOW:]
    kernels.add_fields(row, window[_LOWEST], counts)
    row[ZEROS] += window[_ELEMENTS] - counts.sum()
    counts[:] = 0
    window[_ELEMENTS] = 0


@compiled
def _move_window(sets: Any, window: Any, least: Any, highest: Any, row: Any) -> None:
    """Let the window contain two exponent fields, less than 32 apart."""
    if least < window[_LOWEST] or highest >= window[_LOWEST] + planes.WINDOW:
        _empty_window(sets, window, row)
        window[_LOWEST] = least - (planes.WINDOW - 1 - (highest - least)) // 2


@compiled
def _words_at(words: Any, length: Any) -> Any:
    return kernels.carray(pointer(words, np.uint32(0)), (length,))


@compiled
def _class(mantissa: Any) -> Any:
    found = 0
    for cut in _CUTS:
        found += np.int64(mantissa) > cut
    return found


@compiled
def _add_subnormal_powers(tops: Any, values: Any, counts: Any) -> None:
    """Count the powers of two that are subnormals, whose distances exceed all bins."""
    for j in range(len(values)):
        magnitude = np.uint32(values[j] << np.uint32(1))
        if magnitude and magnitude <= np.uint32(_MANTISSA) and not magnitude & np.uint32(magnitude - np.uint32(1)):
            counts[1, _class(tops[j // LANES] & np.uint32(_MANTISSA)), DISTANCES - 1] += 1


@compiled
def _add_edges(words: Any, listed: Any, places: Any, found: Any, window: Any, row: Any) -> None:
    """Count a tile's powers of two that are no subnormals, where the adders found some, and with exponents all edges.

    Args:
        words, places: addresses of the words, and of memory for as many uint32s and a vector.
        found: int64, shape (_COPIES, _CLASSES * DISTANCES).
        window: not zero if exponents were added; ``row``: to which their edges are added.
    """
    number = np.int64(0)
    for c in range(_CLASSES):
        numbers, limits, edges, length = listed[c]
        lanes = kernels.carray(pointer(edges, np.uint16(0)), (-(-length // LANES),))
        for turn in range(len(lanes)):
            if lanes[turn]:
                offset, vectors = VECTOR_BYTES * turn, min(LANES, length - LANES * turn)
                target = places + 4 * number
                number += list_edges(words, numbers + offset, limits + offset, vectors, c * DISTANCES, target)
    listed_places = _words_at(places, number)
    for j in range(number):
        edge = np.int64(listed_places[j])
        if edge < _NEAR_NEXT:
            found[j % _COPIES, edge & 255] += 1
        if window:
            kernels.move_to_edge(row, edge >> 8 & 255, edge >= _NEAR_NEXT)


@compiled
def _add_maxima(maxima: Any, sets: Any, groups: Any, least: Any, highest: Any, zeros: Any, found: Any) -> None:
    """Count a tile's vectors by the exponent field of their block's largest magnitude.

    Args:
        maxima: the addresses of the tile's halves, its order and its windows, and the length of a window's limits.
        least, highest: of the tops that are not zero; ``zeros``: how many are.
    """
    halves, order, windows, width = maxima
    end = -(-groups // LANES) * planes.COLUMNS
    _words_at(halves, end)[groups * LANES :] = np.uint32(0)
    last = _WINDOWS - 1 - (least >> _FIELD) // planes.WINDOW
    for window in range(_WINDOWS - 1 - (highest >> _FIELD) // planes.WINDOW, last + 1):
        limits, number = windows + 4 * width * window, _REACHES * _CLASSES + window
        none = np.int64(0)
        _add_listed(halves, order, limits, groups, sets, number, none, _place(found), none, none)
    if last == _WINDOWS - 1:
        # Zeros have the exponent field of subnormals.
        found[_ZEROS - 1] -= end - groups * LANES + zeros


@compiled
def _add_zeros(tops: Any, zeros: Any, vectors: Any, found: Any) -> None:
    """Count the zeros of whole blocks by the exponent field of the largest magnitude.

    Args:
        tops, zeros: of blocks of so many vectors.
        found: int64, shape (_COPIES, 256).
    """
    for block in range(len(tops) // vectors):
        zero = np.int64(0)
        for vector in range(np.uint64(block * vectors), np.uint64((block + 1) * vectors)):
            zero += zeros[vector]
        found[np.uint64(block % _COPIES), np.uint64(tops[np.uint64(block * vectors)] >> np.uint32(_FIELD))] += zero


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
def _add_one_by_one(values: Any, top: Any, found: Any) -> None:
    """Count a block by exact exponents."""
    highest, mantissa = _normalised(top)
    c, counts = _class(mantissa), _counts_of(found)
    for value in values:
        magnitude = np.uint32(value << np.uint32(1))
        if magnitude:
            field, mantissa = _normalised(magnitude)
            distance = min(highest - field, DISTANCES - 1)
            counts[0, c, distance] += 1
            counts[1, c, distance] += mantissa == 0
            for k in range(len(_CUTS)):
                found[_OVER + k] += distance == 0 and mantissa > _CUTS[k]


@compiled
def _add_others(tile: Any, values: Any, blocks: Any, vectors: Any, found: Any) -> Any:
    """Count the blocks that are not in the planes; return the address of the words with zeros in their place."""
    size = vectors * LANES
    for j in range(len(values)):
        tile.chosen[j] = values[j]
    for block in range(blocks):
        top = tile.tops[block * vectors]
        field = top >> np.uint32(_FIELD)
        if not _LEAST_FIELD <= field <= _MOST_FIELD:
            if _TINY_FIELD <= field < _BROKEN_FIELD:
                _add_one_by_one(values[block * size : (block + 1) * size], top, found)
            tile.chosen[block * size : (block + 1) * size] = np.uint32(0)
    return _place(tile.chosen)


@compiled
def _counts_of(found: Any) -> Any:
    return found[:_MAXIMA].reshape(_KINDS, _CLASSES, DISTANCES)


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
def _add_tiles(
    tile: Any, words: Any, blocks: Any, vectors: Any, ahead: Any, found: Any, counting: Any, is_alone: Any
) -> None:
    """Count blocks of so many vectors, from an address with words of whole groups of sixteen vectors, a tile at a time.

    Args:
        ahead: how many bytes after the words to prefetch meanwhile.
        counting: counts the exponents; ``is_alone``: they are counted already, or not at all.
    """
    most = max(_TILE // (LANES * vectors), 1)
    is_shared = vectors <= LANES and not vectors & (vectors - 1)
    tops, sets, listed, window = _place(tile.tops), _place(tile.sets), _place(tile.listed), tile.window
    row = counting.row
    maxima = _place(tile.halves), _place(tile.order), _place(tile.windows), tile.windows.shape[1]
    while blocks > 0:
        now = min(blocks, most)
        length, groups = now * vectors, -(-now * vectors // LANES)
        least = measure(words, tops, groups, vectors if is_shared else 1)
        if not is_shared:
            _spread_tops(tile.tops[:length], vectors)
        if least == 0:
            least = count_zeros(words, _place(tile.zeros), length)
            _add_zeros(tile.tops[:length], tile.zeros, vectors, tile.found_zeros)
        inside, lowest, highest, zeros = sort(tops, maxima[0], listed, groups)
        # The padding of the last group has only zeros, too.
        found[_ZERO] += (zeros - (groups * LANES - length)) // vectors
        if highest:
            _add_maxima(maxima, sets, groups, lowest, highest, zeros, found)
        values, counted = _words_at(words, groups * planes.COLUMNS), words
        most_distant, window_at = (highest >> _FIELD) - (least >> _FIELD), np.int64(0)
        is_apart = inside + zeros < groups * LANES or most_distant >= planes.WINDOW
        window[_IS_APART] = is_apart
        if not is_alone and is_apart:
            kernels.add_float32(counting, words, length * LANES)
        elif not is_alone:
            window_at = _place(window)
            if highest:
                _move_window(sets, window, least >> _FIELD, highest >> _FIELD, row)
                kernels.extend_ends(counting.ends, least, highest)
            window[_ELEMENTS] += length * LANES
        if inside + zeros < groups * LANES:
            counted = _add_others(tile, values, now, vectors, found)
        if inside:
            if _add_classes(counted, words + ahead, tile.listed, sets, found, most_distant, window_at):
                _add_edges(counted, tile.listed, _place(tile.places), tile.found_powers, window_at, row)
            if least <= _MANTISSA:
                _add_subnormal_powers(tile.tops, _words_at(counted, len(values)), _counts_of(found))
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
        is_apart = given[_EXPONENTS] and tile.window[_IS_APART]
        if is_apart:
            # So many tiles at once that the memory is read all the time.
            kernels.add_float32(counting, words, blocks * given[_PADDED])
        is_copy, is_alone = words == _place(tile.words), is_apart or not given[_EXPONENTS]
        _add_tiles(tile, words, blocks, vectors, _AHEAD * (not is_copy), found, counting, is_alone)
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
    _finish(owners[1], found, counting.row)
    kernels.finish32(owners[0])


@compiled_for("void(int64, int64, int64, int64, int64, int64, UniTuple(int64, 2))")
def _count(work: Any, given: Any, length: Any, found: Any, width: Any, threads: Any, team: Any) -> None:
    results = np.zeros((threads, width), np.int64)
    used = shares.run(work, given, length, results, team)
    total = shares.carray(pointer(found, np.int64(0)), (width,))
    total[:_ROW] = results[:used, :_ROW].sum(0)
    kernels.merge(results[:used, _ROW:], total[_ROW:])


@compiled
def _finish(tile: Any, found: Any, row: Any) -> None:
    """Count what the planes still hold, and add the copies of counters."""
    for number in range(_EXPONENT_SET):
        _empty(_planes_place(_place(tile.sets), number), _counts_place(_place(found), number))
    _empty_window(_place(tile.sets), tile.window, row)
    found[_CLASSES * DISTANCES : _MAXIMA] += tile.found_powers.sum(0)
    found[_ZEROS:_OVER] += tile.found_zeros.sum(0)


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
        tuple(map(tuple, each)) for each in found[:_MAXIMA].reshape(_KINDS, _CLASSES, DISTANCES).tolist()
    )
    inside, (*over, zero) = slice(_TINY_FIELD, _BROKEN_FIELD), found[_OVER:_ROW].tolist()
    fields, zeros = found[_MAXIMA:_ZEROS][::-1] // (padded // LANES), found[_ZEROS:_OVER]
    maxima, broken, tiny = fields[inside], int(fields[_BROKEN_FIELD]), int(fields[:_TINY_FIELD].sum())
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
