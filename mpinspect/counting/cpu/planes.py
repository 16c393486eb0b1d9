"""32 counters in the bits of words: the fastest way to count the exponents of a window of 32.

A value becomes a 32-bit word with one bit set, the exponent field modulo 32; zero becomes a zero word. Words are added bitwise:
plane k holds bit k of 32 counters, for each of 256 columns. A full adder of three words takes a few logical operations for
all counters, and a tree of adders needs one adder per value (carry-save addition, as in Harley and Seal's population
count). No addition scatters, so none waits for another.

Whether a block fits into the window is known only after it has been read. It is therefore added to copies of the lower
planes, which replace the planes if the block fits.
"""

from __future__ import annotations

from typing import Any

import numba.types
import numpy as np

from mpinspect.counting.cpu.compiling import compiled
from mpinspect.counting.cpu.vectors import (
    I16,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    Code,
    Words,
    add_rows,
    constant,
    copy_row,
    emitted,
)

types: Any = numba.types

#: Exponents in a window.
WINDOW = 32
#: Values in a block, and columns; a column has sixteen values of a block, sixteen apart.
BLOCK, COLUMNS = 4096, 256
#: Maximum number of blocks that the planes hold. A column's sums then fit twelve bits, and the sum over all columns twenty.
MOST_BLOCKS = 255
#: Planes that are copied; a row of carries follows them.
LOWER = 4
#: Rows of the other planes: one for each bit, then, from row 20 on, carries not yet paired with another of the same weight.
ROWS = 20 + 8

_WAITING = 20
# Number of columns that are left when the counters are read.
_LAST_COLUMNS = 2

_Word = np.uint32

ROW_BYTES = 4 * COLUMNS
#: Left rotation of a word that moves the mantissa to the top, below it sign and exponent (nine bits).
_TURN = 9
#: Rotated mantissas less than 2^-11 below the next power of two are within _NEAR_TOP of the end; _BELOW masks the other bits.
_NEAR_TOP, _BELOW = 1 << (32 - 11), (1 << _TURN) - 1
#: Prefetch distance in bytes: a block.
_AHEAD = 4 * BLOCK


class Sums:
    """Words to add to the planes: at most two of each weight, since a third combines them into a sum and a carry."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._waiting: list[list[Any]] = [[] for _ in range(LOWER + 1)]

    def add(self, word: Any, plane: int) -> None:
        waiting = self._waiting[plane]
        waiting.append(word)
        if len(waiting) == 3 and plane < LOWER:
            total, carry = self._code.full_adder(*waiting)
            waiting[:] = [total]
            self.add(carry, plane + 1)

    def total(self, plane: int) -> Any:
        """Return the sum of the words of this weight."""
        waiting = self._waiting[plane]
        if len(waiting) == 2:
            self.add(constant(Words, 0), plane)
        return waiting[0]

    def carries(self) -> Any:
        """Return the carries out of the planes: sixteen values plus fifteen counted ones cause at most one."""
        first, *others = self._waiting[LOWER]
        for other in others:
            first = self._code.builder.or_(first, other)
        return first

    def store(self, before: Any, after: Any) -> None:
        """Add sixteen columns of the lower planes at one address; write the sums, and the carries, at another."""
        for plane in range(LOWER):
            self.add(self._code.load(before, plane * ROW_BYTES), plane)
            self._code.store(self.total(plane), after, plane * ROW_BYTES)
        self._code.store(self.carries(), after, LOWER * ROW_BYTES)


@emitted(types.UniTuple(types.uint32, 2), *[types.int64] * 4)
def add_block(code: Code, bits: Any, before: Any, after: Any, masks: Any) -> Any:
    """Add a block to copies of the lower planes, and return its extremes.

    Args:
        bits: address of BLOCK float32 values.
        before: address of the lower planes, uint32, LOWER rows of COLUMNS.
        after: address for the planes with the block added, then the carries out of them, LOWER + 1 rows of COLUMNS.
        masks: address for 16 uint16: bit i of mask k is set if, among the sixteen values from 256 k + i on, sixteen apart,
            one is a power of two or has a significand of at least 2 - 2^-11.

    Returns:
        (uint32, uint32): twice the least non-zero magnitude (2^32 - 1 without one), twice the largest magnitude.
    """
    builder = code.builder

    def body(turn: Any, ends: list[Any]) -> list[Any]:
        """Process sixteen columns, whose 256 values are contiguous."""
        values = builder.add(bits, builder.mul(turn, constant(I64, LANES * VECTOR_BYTES)))
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        sums, nearest = Sums(code), constant(Words, 2**32 - 1)
        least, largest = ends
        for row in range(LANES):
            value = code.load(values, row * VECTOR_BYTES)
            code.prefetch(values, row * VECTOR_BYTES + _AHEAD)
            magnitude = builder.add(value, value)
            nonzero = builder.icmp_unsigned("!=", magnitude, constant(Words, 0))
            turned = code.operation("fshl", value, value, constant(Words, _TURN))
            bit = code.operation("fshl", constant(Words, 1), constant(Words, 1), turned)
            sums.add(builder.select(nonzero, bit, constant(Words, 0)), 0)
            least = builder.select(nonzero, code.operation("umin", least, magnitude), least)
            largest = code.operation("umax", largest, magnitude)
            # The addition wraps mantissas near the top to small values, and moves 0 (a power of two) to _NEAR_TOP.
            moved = builder.add(turned, constant(Words, _NEAR_TOP))
            nearest = builder.select(nonzero, code.operation("umin", nearest, moved), nearest)
        sums.store(builder.add(before, offset), builder.add(after, offset))
        found = builder.icmp_unsigned("<=", nearest, constant(Words, _NEAR_TOP + _BELOW))
        code.store(builder.bitcast(found, I16), builder.add(masks, builder.add(turn, turn)), 0)
        return [least, largest]

    least, largest = code.loop(constant(I64, COLUMNS // LANES), [constant(Words, 2**32 - 1), constant(Words, 0)], body)
    return [
        code.operation("vector.reduce.umin", least, result=I32),
        code.operation("vector.reduce.umax", largest, result=I32),
    ]


@compiled
def add_carries(planes: Any, carries: Any, blocks: Any) -> None:
    """Add the carries out of the lower planes to the others.

    A carry waits for a second of its weight: every other block adds to plane 4, every fourth to plane 5, and so on.

    Args:
        planes: address of uint32s, ROWS rows of COLUMNS, initially zeros.
        carries: address of uint32s, COLUMNS; overwritten.
        blocks: number of blocks in the planes, below MOST_BLOCKS.
    """
    level = 0
    while blocks & 1:
        add_rows(planes + (LOWER + level) * ROW_BYTES, planes + (_WAITING + level) * ROW_BYTES, carries, COLUMNS)
        blocks, level = blocks >> 1, level + 1
    copy_row(planes + (_WAITING + level) * ROW_BYTES, carries, COLUMNS)


@compiled
def _add_words(a: Any, b: Any, c: Any) -> Any:
    """Add three words with a full adder for each bit; return the sum and the carry."""
    both = _Word(a ^ b)
    return _Word(both ^ c), _Word(_Word(a & b) | _Word(c & both))


@compiled
def _add_waiting(planes: Any, blocks: Any, used: Any) -> None:
    """Add pending carries to the first ``used`` planes."""
    for level in range(used - LOWER):
        if blocks >> level & 1:
            carries = planes[_WAITING + level]
            for k in range(LOWER + level, used):
                plane = planes[k]
                for j in range(COLUMNS):
                    carry = carries[j]
                    carries[j] = _Word(plane[j] & carry)
                    plane[j] = _Word(plane[j] ^ carry)


@compiled
def take(planes: Any, blocks: Any, totals: Any) -> None:
    """Read the 32 counters, and clear the planes.

    Args:
        planes: uint32, shape (ROWS, COLUMNS), with the lower planes copied in.
        blocks: number of blocks in the planes.
        totals: uint32, shape (32,), filled.
    """
    # The number of bits in the largest sum of a column.
    used = LOWER
    while blocks * BLOCK // COLUMNS >> used:
        used += 1
    _add_waiting(planes, blocks, used)
    columns = COLUMNS
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
    # Rows of pending carries need no clearing, since they are written before they are read.
    planes[:used] = _Word(0)
