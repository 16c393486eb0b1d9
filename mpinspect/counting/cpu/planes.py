"""32 counters side by side, in the bits of words: the fastest way to count what falls into a window of 31 exponents.

A value becomes one bit of a 32-bit word, 1 << (exponent field - the window's first), bit 31 if it lies outside. Words are
added up bit by bit: plane k holds bit k of 32 counters, for each of 256 columns. A full adder of three words is a few logical
operations for all of the counters, and in a tree of them a value costs one (carry-save addition, as in Harley and Seal's
population count). Nothing is scattered, so that no addition waits for another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpinspect.counting.cpu.compiling import compiled

#: Exponents in a window.
WINDOW = 31
#: Values in a block, and columns: value i belongs to column i modulo COLUMNS.
BLOCK, COLUMNS = 4096, 256
#: Blocks that fit into the planes: a column's sums have ten bits then, and those of all columns eighteen.
MOST_BLOCKS = 63
#: Rows of the array: a plane for each bit, then the carries that wait for another of their weight, from 16 on.
ROWS = 18 + 6

_BITS_OF_A_COLUMN, _WAITING = 10, 18
# Columns that are left when the counters are read off.
_LAST_COLUMNS = 2

_Word = np.uint32


@compiled
def _add_words(a: Any, b: Any, c: Any) -> Any:
    """A full adder for each bit of three words: the sum, the carry."""
    both = _Word(a ^ b)
    return _Word(both ^ c), _Word(_Word(a & b) | _Word(c & both))


@compiled
def _word(bits: Any, first: Any) -> Any:
    field = _Word(_Word(bits & _Word(0x7FFFFFFF)) >> _Word(23))
    return _Word(_Word(1) << min(_Word(field - first), _Word(31)))


@compiled
def _add_two(total: Any, a: Any, b: Any, first: Any) -> Any:
    """The words of two values, added to a word: the sum, the carry."""
    return _add_words(total, _word(a, first), _word(b, first))


@compiled
def _larger_turned(group: Any, bits: Any) -> Any:
    """The larger of ``group`` and the value's mantissa, turned as ``kernels`` says; zero has none."""
    magnitude = _Word(bits & _Word(0x7FFFFFFF))
    turned = _Word(0) if magnitude == _Word(0) else _Word(_Word(magnitude << _Word(9)) - _Word(1))
    return max(group, turned)


@compiled
def add_block(bits: Any, first: Any, groups: Any, planes: Any, blocks: Any) -> None:
    """Add a block to the planes, and fill ``groups`` with its columns' largest turned mantissas.

    Args:
        bits: uint32, shape (BLOCK,): float32 values.
        first: uint32, the exponent field that bit 0 counts.
        groups: uint32, shape (COLUMNS,).
        planes: uint32, shape (ROWS, COLUMNS), zeros to begin with.
        blocks: how many the planes hold already, below MOST_BLOCKS.
    """
    b0, b1, b2, b3 = bits[0:256], bits[256:512], bits[512:768], bits[768:1024]
    b4, b5, b6, b7 = bits[1024:1280], bits[1280:1536], bits[1536:1792], bits[1792:2048]
    b8, b9, ba, bb = bits[2048:2304], bits[2304:2560], bits[2560:2816], bits[2816:3072]
    bc, bd, be, bf = bits[3072:3328], bits[3328:3584], bits[3584:3840], bits[3840:4096]
    p0, p1, p2, p3, carries = planes[0], planes[1], planes[2], planes[3], planes[_BITS_OF_A_COLUMN]
    for j in range(COLUMNS):
        x, y, z = b0[j], b1[j], b2[j]
        group = _larger_turned(_larger_turned(_larger_turned(_Word(0), x), y), z)
        s0, c0 = _add_two(_word(x, first), y, z, first)
        x, y = b3[j], b4[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c1 = _add_two(s0, x, y, first)
        x, y = b5[j], b6[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c2 = _add_two(s0, x, y, first)
        x, y = b7[j], b8[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c3 = _add_two(s0, x, y, first)
        x, y = b9[j], ba[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c4 = _add_two(s0, x, y, first)
        x, y = bb[j], bc[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c5 = _add_two(s0, x, y, first)
        x, y = bd[j], be[j]
        group = _larger_turned(_larger_turned(group, x), y)
        s0, c6 = _add_two(s0, x, y, first)
        x = bf[j]
        groups[j] = _larger_turned(group, x)
        p0[j], c7 = _add_words(s0, _word(x, first), p0[j])
        s1, d0 = _add_words(c0, c1, c2)
        s1, d1 = _add_words(s1, c3, c4)
        s1, d2 = _add_words(s1, c5, c6)
        p1[j], d3 = _add_words(s1, c7, p1[j])
        s2, e0 = _add_words(d0, d1, d2)
        p2[j], e1 = _add_words(s2, d3, p2[j])
        p3[j], carries[j] = _add_words(e0, e1, p3[j])
    # Each carry waits for a second of its weight: so every other block adds to plane 4, every fourth to plane 5, and so on.
    level = 0
    while blocks & 1:
        plane, waiting = planes[4 + level], planes[_WAITING + level]
        for j in range(COLUMNS):
            plane[j], carries[j] = _add_words(plane[j], waiting[j], carries[j])
        blocks, level = blocks >> 1, level + 1
    planes[_WAITING + level, :] = carries


@compiled
def _add_waiting(planes: Any, blocks: Any) -> None:
    """Add the carries that still wait to the planes."""
    for level in range(6):
        if blocks >> level & 1:
            carries = planes[_WAITING + level]
            for k in range(4 + level, _BITS_OF_A_COLUMN):
                plane = planes[k]
                for j in range(COLUMNS):
                    carry = carries[j]
                    carries[j] = _Word(plane[j] & carry)
                    plane[j] = _Word(plane[j] ^ carry)


@compiled
def take(planes: Any, blocks: Any, totals: Any) -> None:
    """Read the 32 counters off, and empty the planes.

    Args:
        blocks: how many the planes hold.
        totals: uint32, shape (32,), filled.
    """
    _add_waiting(planes, blocks)
    columns, used = COLUMNS, _BITS_OF_A_COLUMN
    while columns > _LAST_COLUMNS:
        columns //= 2
        carries = planes[used, :columns]
        carries[:] = _Word(0)
        for k in range(used):
            left, right = planes[k, :columns], planes[k, columns : 2 * columns]
            for j in range(columns):
                left[j], carries[j] = _add_words(left[j], right[j], carries[j])
        used += 1
    totals[:] = _Word(0)
    for k in range(used):
        for j in range(_LAST_COLUMNS):
            word = planes[k, j]
            for bit in range(32):
                totals[bit] = _Word(totals[bit] + _Word(_Word(_Word(word >> _Word(bit)) & _Word(1)) << _Word(k)))
    planes[:] = _Word(0)
