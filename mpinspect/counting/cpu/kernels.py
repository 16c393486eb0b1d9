"""The loops that count, compiled by numba: one pass over the bits, block by block in the first-level cache.

Adding to one of some hundred counters for every value takes five cycles a value, for neighbours mostly want the same
counter and wait for each other. So nothing is scattered here: each exponent field that occurs in a block is counted by
comparing the whole block with it, many values to an instruction. A block of gradients holds some 15 of them, and its
extremes tell which. What is rare is looked for in groups of values: the largest mantissa of a group, turned so that powers
of two sort above values near the top of their exponent, tells whether one of its values needs a look of its own.

numba widens integers unless each result is cast back, and does not vectorise a loop whose index might be negative:
hence the casts, and slices instead of offsets. Functions refer to each other as globals, never as closures: only so does
numba find them again in its cache on disk. All arithmetic is on integers, so that neither rounding nor a flush-denormals
mode of the thread can change a count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import intrinsic

from mpinspect.counting.layout import HEADER, INFS, NANS, ZEROS

#: Values in a block, and groups in it: value i belongs to group i modulo _GROUPS.
_BLOCK, _GROUPS = 4096, 256
#: Exponents of one block that are counted by comparison; values beyond them are added up one by one.
_MOST_COMPARED = 64
#: Groups of one block whose values are looked at one by one; where there are more, comparing all of them costs less.
_MOST_GROUPS = 32


def _compiled(function: Any) -> Any:
    """Compiled at its first call, and kept on disk for other processes where there is a place to keep it."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # Neither this file's folder nor a home of the user can be written to.
        return njit(nogil=True)(function)


class _Format(NamedTuple):
    """An IEEE encoding. Where nothing else is said, words: unsigned integers as wide as a value.

    ``turn`` shifts sign and field out at the top, ``suspicious`` is the least turned mantissa minus one to look into.
    int64s: ``first`` and ``first_of_integers`` are where in a row the counters of field 0 would stand, of plain values and of
    subnormals that are written as the integers they are multiples of; ``highest_field`` is that of infinities.
    """

    zero: Any
    one: Any
    mask: Any
    infinity: Any
    mantissa_bits: Any
    mantissa: Any
    near_top: Any
    turn: Any
    suspicious: Any
    first: Any
    first_of_integers: Any
    highest_field: Any


def _format(word: Any, mantissa_bits: int, bias: int) -> _Format:
    sign_bit = 8 * np.dtype(word).itemsize - 1
    near_top = (1 << mantissa_bits) - (1 << (mantissa_bits - 11))
    turn = sign_bit + 1 - mantissa_bits
    return _Format(
        word(0),
        word(1),
        word((1 << sign_bit) - 1),
        word((2 * bias + 1) << mantissa_bits),
        word(mantissa_bits),
        word((1 << mantissa_bits) - 1),
        word(near_top),
        word(turn),
        word((near_top << turn) - 1),
        HEADER + 3 * (mantissa_bits - 1),
        HEADER - 3 * bias,
        2 * bias + 1,
    )


class _Scratch(NamedTuple):
    """Arrays of a block's length, but for ``groups``. ``integers`` holds floats, ``of_integers`` is the same memory as words."""

    fields: Any
    groups: Any
    integers: Any
    of_integers: Any


_FORMAT32, _FORMAT64 = _format(np.uint32, 23, 127), _format(np.uint64, 52, 1023)


def _cast(context: Any, value: Any, like: Any) -> Any:
    """``value`` as an integer of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], value, like)

    return like(value, like), generate


_as: Any = intrinsic(_cast)


@_compiled
def _survey(bits: Any, f: Any, fields: Any, groups: Any) -> Any:
    """The fields and the groups' maxima of a block; returns its least magnitude minus one, and its largest magnitude."""
    low, high = _as(f.zero - f.one, f.one), f.zero
    groups[:] = f.zero
    for start in range(0, len(bits), _GROUPS):
        row, row_fields = bits[start : start + _GROUPS], fields[start : start + _GROUPS]
        for j in range(len(row)):
            magnitude = _as(row[j] & f.mask, f.one)
            row_fields[j] = np.uint16(_as(magnitude >> f.mantissa_bits, f.one))
            # Zero minus one is the largest word, so that zeros are never the least.
            low = min(low, _as(magnitude - f.one, f.one))
            high = max(high, magnitude)
            turned = f.zero if magnitude == f.zero else _as(_as(magnitude << f.turn, f.one) - f.one, f.one)
            groups[j] = max(groups[j], turned)
    return low, high


@_compiled
def _occurrences(fields: Any, field: Any) -> Any:
    found = np.uint16(0)
    for j in range(len(fields)):
        found = np.uint16(found + np.uint16(fields[j] == field))
    return np.int64(found)


@_compiled
def _add_fields(fields: Any, f: Any, first: Any, lowest: Any, highest: Any, row: Any) -> None:
    """Count a block's fields; but for zeros none lies outside ``lowest`` .. ``highest``."""
    left = np.int64(len(fields))
    least_compared = max(lowest, highest - _MOST_COMPARED + 1, 1)
    for field in range(highest, least_compared - 1, -1):
        if left == 0:
            return
        found = _occurrences(fields, np.uint16(field))
        left -= found
        row[NANS if field == f.highest_field else first + 3 * field + 1] += found
    if lowest < least_compared and left != 0:
        for j in range(len(fields)):
            field = np.int64(fields[j])
            if 0 < field < least_compared:
                row[first + 3 * field + 1] += 1
                left -= 1
    row[ZEROS] += left


@_compiled
def _move_to_edges(bits: Any, f: Any, first: Any, groups: Any, row: Any) -> None:
    """Powers of two and values near the top, counted among the others so far, to their own counters."""
    for j in range(min(len(groups), len(bits))):
        if groups[j] >= f.suspicious:
            for index in range(j, len(bits), _GROUPS):
                magnitude = _as(bits[index] & f.mask, f.one)
                field, rest = np.int64(magnitude >> f.mantissa_bits), _as(magnitude & f.mantissa, f.one)
                if 0 < field < f.highest_field and (rest == f.zero or rest >= f.near_top):
                    row[first + 3 * field + 1] -= 1
                    row[first + 3 * field + (0 if rest == f.zero else 2)] += 1


@_compiled
def _move_many_to_edges(bits: Any, f: Any, first: Any, lowest: Any, highest: Any, fields: Any, row: Any) -> None:
    """The same, for blocks that hold many such values. Overwrites ``fields``."""
    for which in (0, 2):
        for j in range(len(bits)):
            magnitude = _as(bits[j] & f.mask, f.one)
            rest = _as(magnitude & f.mantissa, f.one)
            moves = rest == f.zero if which == 0 else rest >= f.near_top
            fields[j] = np.uint16(_as(magnitude >> f.mantissa_bits, f.one)) if moves else np.uint16(0)
        for field in range(max(lowest, 1), min(highest + 1, f.highest_field)):
            found = _occurrences(fields, np.uint16(field))
            row[first + 3 * field + 1] -= found
            row[first + 3 * field + which] += found


@_compiled
def _add_values(block: Any, f: Any, first: Any, scratch: Any, row: Any) -> Any:
    """Count a block, subnormals as zeros and infinities as NaNs. Returns what ``_survey`` does.

    Args:
        first: where the counters of field 0 would stand.
    """
    fields = scratch.fields[: len(block)]
    low, high = _survey(block, f, fields, scratch.groups)
    lowest, highest = np.int64(_as(low + f.one, f.one) >> f.mantissa_bits), np.int64(high >> f.mantissa_bits)
    _add_fields(fields, f, first, lowest, highest, row)
    suspicious = 0
    for j in range(len(scratch.groups)):
        suspicious += scratch.groups[j] >= f.suspicious
    if suspicious <= _MOST_GROUPS or highest - lowest > _MOST_COMPARED:
        _move_to_edges(block, f, first, scratch.groups, row)
    else:
        _move_many_to_edges(block, f, first, lowest, highest, fields, row)
    return low, high


@_compiled
def _move_subnormals(bits: Any, f: Any, scratch: Any, row: Any) -> None:
    """Subnormals, counted as zeros so far, to their exponents, edges included.

    A subnormal is an integer times a power of two: that integer, as a float, is a normal number with the same significand.
    """
    integers = scratch.integers[: len(bits)]
    for j in range(len(bits)):
        magnitude = _as(bits[j] & f.mask, f.one)
        integers[j] = np.int64(f.zero if magnitude > f.mantissa else magnitude)
    # All of the block is counted a second time, what is no subnormal as zero.
    row[ZEROS] -= len(bits)
    _add_values(scratch.of_integers[: len(bits)], f, f.first_of_integers, scratch, row)


@_compiled
def _move_infinities(bits: Any, f: Any, row: Any) -> Any:
    """Infinities, counted as NaNs so far, to their counter; returns the largest finite magnitude."""
    high = f.zero
    infinities = 0
    for j in range(len(bits)):
        magnitude = _as(bits[j] & f.mask, f.one)
        infinities += magnitude == f.infinity
        high = max(high, f.zero if magnitude >= f.infinity else magnitude)
    row[NANS] -= infinities
    row[INFS] += infinities
    return high


@_compiled
def _add_block(block: Any, f: Any, scratch: Any, row: Any, ends: Any) -> None:
    low, high = _add_values(block, f, f.first, scratch, row)
    if low < f.mantissa:
        _move_subnormals(block, f, scratch, row)
    if high >= f.infinity:
        high = _move_infinities(block, f, row)
    ends[0] = min(ends[0], low)
    ends[1] = max(ends[1], high)


@_compiled
def _add(bits: Any, f: Any, integers: Any, row: Any, ends: Any) -> None:
    scratch = _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, bits.dtype), integers, integers.view(bits.dtype))
    for start in range(0, len(bits), _BLOCK):
        _add_block(bits[start : start + _BLOCK], f, scratch, row, ends)


@_compiled
def add_float32(bits: Any, row: Any, ends: Any) -> None:
    """Add float32 values to a NARROW row, but for its two extremes, which go to ``ends``.

    Args:
        bits: uint32, one-dimensional, contiguous.
        row: int64, shape (NARROW.length,).
        ends: uint32, shape (2,): the least non-zero magnitude minus one and the largest finite one so far; to begin with
            2^32 - 1 and 0.
    """
    _add(bits, _FORMAT32, np.empty(_BLOCK, np.float32), row, ends)


@_compiled
def add_float64(bits: Any, row: Any, ends: Any) -> None:
    """The same for float64 values: uint64 bits and ends, and a WIDE row."""
    _add(bits, _FORMAT64, np.empty(_BLOCK, np.float64), row, ends)


@_compiled
def add_float16(bits: Any, row: Any, ends: Any) -> None:
    """The same for float16 values: uint16 bits; row and ends as for float32."""
    wide, integers = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    of_integers = integers.view(np.uint32)
    scratch = _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint32), integers, of_integers)
    for start in range(0, len(bits), _BLOCK):
        narrow = bits[start : start + _BLOCK]
        # A subnormal is its mantissa, an integer, times 2^-24. No subnormal float32 occurs on the way.
        for j in range(len(narrow)):
            integers[j] = np.float32(narrow[j] & np.uint16(0x3FF))
        for j in range(len(narrow)):
            magnitude = np.uint32(narrow[j] & np.uint16(0x7FFF))
            shifted = np.uint32(magnitude << np.uint32(13))
            normal = np.uint32(shifted + np.uint32((224 if magnitude >= np.uint32(0x7C00) else 112) << 23))
            subnormal = np.uint32(of_integers[j] - np.uint32(24 << 23)) if magnitude else np.uint32(0)
            wide[j] = normal if magnitude >= np.uint32(0x400) else subnormal
        _add_block(wide[: len(narrow)], _FORMAT32, scratch, row, ends)


@_compiled
def add_bfloat16(bits: Any, row: Any, ends: Any) -> None:
    """The same for bfloat16 values: uint16 bits; row and ends as for float32."""
    wide, integers = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    scratch = _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint32), integers, integers.view(np.uint32))
    for start in range(0, len(bits), _BLOCK):
        narrow = bits[start : start + _BLOCK]
        for j in range(len(narrow)):
            wide[j] = np.uint32(np.uint32(narrow[j]) << np.uint32(16))
        _add_block(wide[: len(narrow)], _FORMAT32, scratch, row, ends)
