"""32 counters side by side, in the bits of words: the fastest way to count what falls into a window of 32 exponents.

A value becomes one bit of a 32-bit word, that of its exponent field modulo 32; zero becomes none. Words are added up bit by bit:
plane k holds bit k of 32 counters, for each of 256 columns. A full adder of three words is a few logical operations for
all of the counters, and in a tree of them a value costs one (carry-save addition, as in Harley and Seal's population count).
Nothing is scattered, so that no addition waits for another.

Whether a block fits into the window is known once it has been read. So it is added to copies of the lower planes while it is
read, and they replace the planes if it did fit.
"""

from __future__ import annotations

from typing import Any

import numba.types
import numpy as np
from numba.extending import intrinsic

from mpinspect.counting.cpu.compiling import compiled
from mpinspect.counting.cpu.vectors import I16, I32, I64, LANES, VECTOR_BYTES, Code, Words, add_rows, constant

types: Any = numba.types

#: Exponents in a window.
WINDOW = 32
#: Values in a block, and columns: sixteen values, sixteen apart, belong to one.
BLOCK, COLUMNS = 4096, 256
#: Blocks that fit into the planes: a column's sums have ten bits then, and those of all columns eighteen.
MOST_BLOCKS = 63
#: Planes that are copied; a row of carries follows them.
LOWER = 4
#: Rows of the other planes: one for each bit, then the carries that wait for another of their weight, from 16 on.
ROWS = 18 + 6

_WAITING = 18
# Columns that are left when the counters are read off.
_LAST_COLUMNS = 2

_Word = np.uint32

_ROW_BYTES = 4 * COLUMNS
#: The mantissa begins with the ninth bit of a word that is rotated by as many as sign and exponent have.
_TURN = 9
#: Turned mantissas less than 2^-11 below the next power of two are within this of the end; what is below the mantissa.
_NEAR_TOP, _BELOW = 1 << (32 - 11), (1 << _TURN) - 1
#: How far ahead memory is asked for: a block.
_AHEAD = 4 * BLOCK


class _Sums:
    """Words on their way into the planes: at most two of each weight, a third makes one of them and one of the next weight."""

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
        """The words of this weight as one."""
        waiting = self._waiting[plane]
        if len(waiting) == 2:
            self.add(constant(Words, 0), plane)
        return waiting[0]

    def carries(self) -> Any:
        """The carries out of the planes: sixteen values and fifteen already counted make one at most."""
        first, *others = self._waiting[LOWER]
        for other in others:
            first = self._code.builder.or_(first, other)
        return first


def _add_block(context: Any, bits: Any, before: Any, after: Any, masks: Any) -> Any:
    """Add a block to copies of the lower planes, and say what it holds.

    Args:
        bits: address of BLOCK float32 values.
        before: of the lower planes, uint32, LOWER rows of COLUMNS.
        after: of where they are to be written with the block added, and the carries out of them, LOWER + 1 rows of COLUMNS.
        masks: of 16 uint16, filled: bit i of mask k tells that among the sixteen values from 256 k + i on, sixteen apart,
            one is a power of two or has a significand of at least 2 - 2^-11.

    Returns:
        (uint32, uint32): twice the least non-zero magnitude (2^32 - 1 if there is none), twice the largest one.
    """
    int64, word = types.int64, types.uint32
    return types.UniTuple(word, 2)(int64, int64, int64, int64), _generate_add_block


def _generate_add_block(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    bits, before, after, masks = arguments
    code = Code(builder)

    def body(turn: Any, ends: list[Any]) -> list[Any]:
        """Sixteen columns: their 256 values lie side by side."""
        values = builder.add(bits, builder.mul(turn, constant(I64, LANES * VECTOR_BYTES)))
        offset = builder.mul(turn, constant(I64, VECTOR_BYTES))
        old, new = builder.add(before, offset), builder.add(after, offset)
        sums, nearest = _Sums(code), constant(Words, 2**32 - 1)
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
            # Mantissas near the top come to lie below zero, the mantissa of a power of two, which moves up as much.
            moved = builder.add(turned, constant(Words, _NEAR_TOP))
            nearest = builder.select(nonzero, code.operation("umin", nearest, moved), nearest)
        for plane in range(LOWER):
            sums.add(code.load(old, plane * _ROW_BYTES), plane)
            code.store(sums.total(plane), new, plane * _ROW_BYTES)
        code.store(sums.carries(), new, LOWER * _ROW_BYTES)
        found = builder.icmp_unsigned("<=", nearest, constant(Words, _NEAR_TOP + _BELOW))
        code.store(builder.bitcast(found, I16), builder.add(masks, builder.add(turn, turn)), 0)
        return [least, largest]

    least, largest = code.loop(constant(I64, COLUMNS // LANES), [constant(Words, 2**32 - 1), constant(Words, 0)], body)
    ends = [
        code.operation("vector.reduce.umin", least, result=I32),
        code.operation("vector.reduce.umax", largest, result=I32),
    ]
    return context.make_tuple(builder, signature.return_type, ends)


add_block: Any = intrinsic(_add_block)


@compiled
def add_carries(planes: Any, carries: Any, blocks: Any) -> None:
    """Take the carries out of the lower planes into the others.

    Each waits for a second of its weight: so every other block adds to plane 4, every fourth to plane 5, and so on.

    Args:
        planes: uint32, shape (ROWS, COLUMNS), zeros to begin with.
        carries: uint32, shape (COLUMNS,); overwritten.
        blocks: how many the planes hold already, below MOST_BLOCKS.
    """
    level, rows = 0, planes.ctypes.data
    while blocks & 1:
        add_rows(
            rows + (LOWER + level) * _ROW_BYTES, rows + (_WAITING + level) * _ROW_BYTES, carries.ctypes.data, COLUMNS
        )
        blocks, level = blocks >> 1, level + 1
    planes[_WAITING + level, :] = carries


@compiled
def _add_words(a: Any, b: Any, c: Any) -> Any:
    """A full adder for each bit of three words: the sum, the carry."""
    both = _Word(a ^ b)
    return _Word(both ^ c), _Word(_Word(a & b) | _Word(c & both))


@compiled
def _add_waiting(planes: Any, blocks: Any, used: Any) -> None:
    """Add the carries that still wait to the planes, of which so many are used."""
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
    """Read the 32 counters off, and empty the planes.

    Args:
        planes: uint32, shape (ROWS, COLUMNS), the lower ones among them by now.
        blocks: how many they hold.
        totals: uint32, shape (32,), filled.
    """
    # As many as the largest sum of a column has bits.
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
    # What waits is written before it is read.
    planes[:used] = _Word(0)
