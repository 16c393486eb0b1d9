"""Loops on the vectors of a tile, as LLVM's instructions: distances, powers of two, zeros and limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba.types
from llvmlite import ir

from mpinspect.counting.cpu import block_layout as layout
from mpinspect.counting.cpu import planes
from mpinspect.counting.cpu.vectors import I8, I16, I32, I64, LANES, VECTOR_BYTES, Code, Words, constant, emitted
from mpinspect.numeric.blocks import DISTANCES

types: Any = numba.types


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

    (least,) = code.loop(groups, [constant(Words, layout.NO_LIMIT)], body)
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

    (least,) = code.loop(vectors, [constant(Words, layout.NO_LIMIT)], body)
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
    lists = [[code.load(listed, 32 * c + 8 * j, I64) for j in range(2)] for c in range(layout.CLASSES)]

    def body(group: Any, state: list[Any]) -> list[Any]:
        least, highest, zeros, *places = state
        offset = builder.mul(group, constant(I64, VECTOR_BYTES))
        top = code.load(builder.add(tops, offset), 0)
        code.store(builder.lshr(top, constant(Words, 1)), builder.add(halves, offset), 0)
        field = builder.sub(builder.lshr(top, constant(Words, layout.FIELD)), constant(Words, layout.LEAST_FIELD))
        is_inside = builder.icmp_unsigned("<=", field, constant(Words, layout.MOST_FIELD - layout.LEAST_FIELD))
        least = code.operation("umin", least, builder.sub(top, constant(Words, 1)))
        highest = code.operation("umax", highest, top)
        limit = builder.or_(top, constant(Words, layout.MANTISSA))
        first = _splat(builder, builder.trunc(builder.mul(group, constant(I64, LANES)), I32))
        numbers = builder.add(first, _lanes(Words, range(LANES)))
        mantissa = builder.and_(top, constant(Words, layout.MANTISSA))
        above = [builder.icmp_unsigned(">", mantissa, constant(Words, cut)) for cut in layout.CUT_MANTISSAS]
        for c in range(layout.CLASSES):
            within = builder.and_(is_inside, above[c - 1]) if c else is_inside
            if c < len(layout.CUT_MANTISSAS):
                within = builder.and_(within, builder.not_(above[c]))
            at = builder.mul(places[c], constant(I64, 4))
            for each, target in zip((numbers, limit), lists[c], strict=True):
                _kept(code, each, within, builder.add(target, at))
            places[c] = builder.add(places[c], _ones(code, within))
        is_zero = builder.icmp_unsigned("==", top, constant(Words, 0))
        return [least, highest, builder.add(zeros, _ones(code, is_zero)), *places]

    first = [constant(Words, layout.NO_LIMIT), constant(Words, 0), *[constant(I64, 0)] * (1 + layout.CLASSES)]
    least, highest, zeros, *places = code.loop(groups, first, body)
    inside = constant(I64, 0)
    for c, place in enumerate(places):
        # Fill the last turn with vectors that have no bits in the planes.
        at = builder.mul(place, constant(I64, 4))
        code.store(constant(Words, 0), builder.add(lists[c][0], at), 0)
        code.store(constant(Words, layout.NO_LIMIT), builder.add(lists[c][1], at), 0)
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
    """Return which magnitudes have no mantissa: zeros, and powers of two that are not subnormals."""
    return builder.icmp_unsigned("==", builder.and_(magnitude, constant(Words, layout.MANTISSA)), constant(Words, 0))


@emitted(types.int64, *[types.int64] * 4)
def count_beyond(code: Code, words: Any, numbers: Any, limits: Any, vectors: Any) -> Any:
    """Return how many values in listed vectors have a distance beyond the planes, 64 or more (int64)."""
    builder = code.builder

    def body(k: Any, state: list[Any]) -> list[Any]:
        offset = builder.mul(k, constant(I64, 4))
        magnitude, limit = _vector(code, words, builder.add(numbers, offset), builder.add(limits, offset), 0)
        is_far = builder.icmp_unsigned(">=", builder.sub(limit, magnitude), constant(Words, DISTANCES << layout.FIELD))
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
        distance = builder.lshr(below, constant(Words, layout.FIELD))
        place = builder.add(start, code.operation("umin", distance, constant(Words, DISTANCES - 1)))
        field = builder.shl(builder.lshr(magnitude, constant(Words, layout.FIELD)), constant(Words, 8))
        is_power = _is_power(builder, magnitude)
        kind = builder.select(is_power, constant(Words, 0), constant(Words, layout.NEAR_NEXT))
        is_edge = builder.icmp_unsigned(">", magnitude, constant(Words, layout.MANTISSA))
        is_edge = builder.and_(
            is_edge, builder.icmp_unsigned("<=", _edge_key(builder, below), constant(Words, layout.EDGE))
        )
        edge = builder.or_(builder.or_(place, field), kind)
        _kept(code, edge, is_edge, builder.add(target, builder.mul(state[0], constant(I64, 4))))
        return [builder.add(state[0], _ones(code, is_edge))]

    return code.loop(vectors, [constant(I64, 0)], body)[0]


def _edge_key(builder: Any, below: Any) -> Any:
    """Return words, made of a limit minus magnitudes, of at most EDGE for zeros, powers of two and values near the next one."""
    return builder.shl(builder.add(below, constant(Words, 1)), constant(Words, 32 - layout.FIELD))


class _Way(NamedTuple):
    """How vectors are added to planes.

    Args:
        higher: whether the vectors' class is a higher one.
        exponents: whether exponents are added, too.
        plain: neither, and single values are not examined.
    """

    higher: bool = False
    exponents: bool = False
    plain: bool = False


def _adder(way: _Way) -> Any:
    """Return a function of compiled code that adds listed vectors to the lower planes, sixteen a turn.

    It returns int64, non-zero if an edge was found: a power of two, or a value near the next one. Its arguments:

    - words: address of the values; numbers, limits: of the vectors' numbers, and of their limits; turns: how many.
    - lower: address of the first sixteen columns to fill; each turn fills the next sixteen.
    - edges: address of uint16s for the lanes with edges, one a turn. If ``way`` is plain: the distance of the first bit.
    - over: where ``way`` is higher, address of int64s, to which the numbers of values beyond each cut are added.
    - ahead: address to prefetch from, as many lines as there are vectors, unless ``way`` is plain.
    - exponents: address of the first sixteen columns of the lower planes of exponents, if ``way`` adds to them; lowest: their
      lowest exponent field.
    """
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
    """Emit the function that ``_adder`` returns."""
    builder, zero, one = code.builder, constant(Words, 0), constant(Words, 1)
    left, right = _shift(code, "l"), _shift(code, "r")
    first = _splat(builder, builder.trunc(builder.shl(edges, constant(I64, layout.FIELD)), I32))
    lowest_field = _splat(builder, builder.trunc(lowest, I32))
    starts = code.memory()

    def body(turn: Any, state: list[Any]) -> list[Any]:
        any_edge, *beyond = state
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        listed, ends = builder.add(numbers, offset), builder.add(limits, offset)
        later = builder.add(ahead, builder.mul(offset, constant(I64, LANES)))
        sums, exponent_sums, least = planes.Sums(code), planes.Sums(code), constant(Words, layout.NO_LIMIT)
        if way.exponents:
            fields = builder.lshr(code.load(ends, 0), constant(Words, layout.FIELD))
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
            for c, cut in enumerate(layout.CUT_MANTISSAS[: len(beyond)]):
                is_over = builder.icmp_unsigned("<", below, constant(Words, layout.MANTISSA - cut))
                beyond[c] = builder.add(beyond[c], _ones(code, is_over))
            distance = builder.lshr(below, constant(Words, layout.FIELD))
            sums.add(left(one, distance), 0)
            if way.exponents:
                exponent_sums.add(right(_splat(builder, code.load(starts, 4 * k, I32)), distance), 0)
        for total, columns in ((sums, lower), (exponent_sums, exponents))[: 1 + way.exponents]:
            total.store(builder.add(columns, offset), builder.add(columns, offset))
        is_edge = builder.icmp_unsigned("<=", least, constant(Words, layout.EDGE))
        if not way.plain:
            code.store(builder.bitcast(is_edge, I16), builder.add(edges, builder.add(turn, turn)), 0)
        return [builder.or_(any_edge, builder.zext(is_edge, Words)), *beyond]

    any_edge, *beyond = code.loop(turns, [zero, *[constant(I64, 0)] * (len(layout.CUT_MANTISSAS) * way.higher)], body)
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
