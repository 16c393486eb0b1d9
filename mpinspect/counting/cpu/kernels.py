"""The loops that count, compiled by numba: one pass over the bits, block by block in the first-level cache.

Adding to one of some hundred counters for every value takes five cycles a value, for neighbours mostly want the same
counter and wait for each other. So nothing is scattered here. A block of float32 words whose exponents lie close enough
together, as gradients' do, goes to the ``planes``. In any other each exponent field that occurs is counted by comparing the
whole block with it, many values to an instruction; its extremes tell which to look for.

What is rare is looked for in groups of values: the largest mantissa of a group, turned so that powers of two sort above
values near the top of their exponent, tells whether one of its values needs a look of its own.

numba widens integers unless each result is cast back, and does not vectorise a loop whose index might be negative:
hence the casts, and slices instead of offsets. Functions refer to each other as globals, never as closures: only so does
numba find them again in its cache on disk. All arithmetic is on integers, so that neither rounding nor a flush-denormals
mode of the thread can change a count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpinspect.counting.cpu import planes
from mpinspect.counting.cpu.compiling import compiled
from mpinspect.counting.cpu.memory import as_type
from mpinspect.counting.layout import HEADER, INFS, NANS, ZEROS

# Value i of a block belongs to group i modulo _GROUPS.
_BLOCK, _GROUPS = planes.BLOCK, planes.COLUMNS
#: Exponents of one block that are counted by comparison; values beyond them are added up one by one.
_MOST_COMPARED = 64
#: Groups of one block whose values are looked at one by one; where there are more, comparing all of them costs less.
_MOST_GROUPS = 32


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


class _Window(NamedTuple):
    """Blocks in the planes: ``state`` (int64) is the exponent field that bit 0 counts, and how many blocks there are."""

    planes: Any
    totals: Any
    state: Any


_FORMAT32, _FORMAT64 = _format(np.uint32, 23, 127), _format(np.uint64, 52, 1023)


@compiled
def _survey(bits: Any, f: Any, fields: Any, groups: Any) -> Any:
    """The fields and the groups' maxima of a block; returns its least magnitude minus one, and its largest magnitude."""
    low, high = as_type(f.zero - f.one, f.one), f.zero
    groups[:] = f.zero
    for start in range(0, len(bits), _GROUPS):
        row, row_fields = bits[start : start + _GROUPS], fields[start : start + _GROUPS]
        for j in range(len(row)):
            magnitude = as_type(row[j] & f.mask, f.one)
            row_fields[j] = np.uint16(as_type(magnitude >> f.mantissa_bits, f.one))
            # Zero minus one is the largest word, so that zeros are never the least.
            low = min(low, as_type(magnitude - f.one, f.one))
            high = max(high, magnitude)
            turned = f.zero if magnitude == f.zero else as_type(as_type(magnitude << f.turn, f.one) - f.one, f.one)
            groups[j] = max(groups[j], turned)
    return low, high


@compiled
def _occurrences(fields: Any, field: Any) -> Any:
    found = np.uint16(0)
    for j in range(len(fields)):
        found = np.uint16(found + np.uint16(fields[j] == field))
    return np.int64(found)


@compiled
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


@compiled
def _move_to_edges(bits: Any, f: Any, first: Any, groups: Any, row: Any) -> None:
    """Powers of two and values near the top, counted among the others so far, to their own counters."""
    for j in range(min(len(groups), len(bits))):
        if groups[j] >= f.suspicious:
            for index in range(j, len(bits), _GROUPS):
                magnitude = as_type(bits[index] & f.mask, f.one)
                field, rest = np.int64(magnitude >> f.mantissa_bits), as_type(magnitude & f.mantissa, f.one)
                if 0 < field < f.highest_field and (rest == f.zero or rest >= f.near_top):
                    row[first + 3 * field + 1] -= 1
                    row[first + 3 * field + (0 if rest == f.zero else 2)] += 1


@compiled
def _move_many_to_edges(bits: Any, f: Any, first: Any, lowest: Any, highest: Any, fields: Any, row: Any) -> None:
    """The same, for blocks that hold many such values. Overwrites ``fields``."""
    for which in (0, 2):
        for j in range(len(bits)):
            magnitude = as_type(bits[j] & f.mask, f.one)
            rest = as_type(magnitude & f.mantissa, f.one)
            moves = rest == f.zero if which == 0 else rest >= f.near_top
            fields[j] = np.uint16(as_type(magnitude >> f.mantissa_bits, f.one)) if moves else np.uint16(0)
        for field in range(max(lowest, 1), min(highest + 1, f.highest_field)):
            found = _occurrences(fields, np.uint16(field))
            row[first + 3 * field + 1] -= found
            row[first + 3 * field + which] += found


@compiled
def _find_edges(block: Any, f: Any, first: Any, lowest: Any, highest: Any, scratch: Any, row: Any) -> None:
    """Move what the groups' maxima tell of to the edge counters. Overwrites ``scratch.fields``."""
    suspicious = 0
    for j in range(len(scratch.groups)):
        suspicious += scratch.groups[j] >= f.suspicious
    if suspicious > _MOST_GROUPS and highest - lowest <= _MOST_COMPARED:
        _move_many_to_edges(block, f, first, lowest, highest, scratch.fields[: len(block)], row)
    elif suspicious:
        _move_to_edges(block, f, first, scratch.groups, row)


@compiled
def _add_values(block: Any, f: Any, first: Any, scratch: Any, row: Any) -> Any:
    """Count a block, subnormals as zeros and infinities as NaNs. Returns what ``_survey`` does.

    Args:
        first: where the counters of field 0 would stand.
    """
    fields = scratch.fields[: len(block)]
    low, high = _survey(block, f, fields, scratch.groups)
    lowest, highest = np.int64(as_type(low + f.one, f.one) >> f.mantissa_bits), np.int64(high >> f.mantissa_bits)
    _add_fields(fields, f, first, lowest, highest, row)
    _find_edges(block, f, first, lowest, highest, scratch, row)
    return low, high


@compiled
def _move_subnormals(bits: Any, f: Any, scratch: Any, row: Any) -> None:
    """Subnormals, counted as zeros so far, to their exponents, edges included.

    A subnormal is an integer times a power of two: that integer, as a float, is a normal number with the same significand.
    """
    integers = scratch.integers[: len(bits)]
    for j in range(len(bits)):
        magnitude = as_type(bits[j] & f.mask, f.one)
        integers[j] = np.int64(f.zero if magnitude > f.mantissa else magnitude)
    # All of the block is counted a second time, what is no subnormal as zero.
    row[ZEROS] -= len(bits)
    _add_values(scratch.of_integers[: len(bits)], f, f.first_of_integers, scratch, row)


@compiled
def _move_infinities(bits: Any, f: Any, row: Any) -> Any:
    """Infinities, counted as NaNs so far, to their counter; returns the largest finite magnitude."""
    high = f.zero
    infinities = 0
    for j in range(len(bits)):
        magnitude = as_type(bits[j] & f.mask, f.one)
        infinities += magnitude == f.infinity
        high = max(high, f.zero if magnitude >= f.infinity else magnitude)
    row[NANS] -= infinities
    row[INFS] += infinities
    return high


@compiled
def _add_block(block: Any, f: Any, scratch: Any, row: Any, ends: Any) -> None:
    low, high = _add_values(block, f, f.first, scratch, row)
    if low < f.mantissa:
        _move_subnormals(block, f, scratch, row)
    if high >= f.infinity:
        high = _move_infinities(block, f, row)
    ends[0] = min(ends[0], low)
    ends[1] = max(ends[1], high)


@compiled
def _extremes(bits: Any, f: Any) -> Any:
    """The least magnitude minus one, and the largest magnitude, as ``_survey`` has them."""
    low, high = as_type(f.zero - f.one, f.one), f.zero
    for j in range(len(bits)):
        magnitude = as_type(bits[j] & f.mask, f.one)
        low = min(low, as_type(magnitude - f.one, f.one))
        high = max(high, magnitude)
    return low, high


@compiled
def _empty_planes(window: Any, row: Any) -> None:
    """Add what the planes hold to the row."""
    first, blocks = window.state
    if blocks:
        planes.take(window.planes, blocks, window.totals)
        for bit in range(planes.WINDOW):
            row[_FORMAT32.first + 3 * (first + bit) + 1] += window.totals[bit]
        # Nothing but zeros is let in from outside the window.
        row[ZEROS] += window.totals[planes.WINDOW]
        window.state[1] = 0


@compiled
def _add_block32(block: Any, scratch: Any, window: Any, row: Any, ends: Any) -> None:
    """Count a block of float32 words, in the planes if they suit it."""
    f = _FORMAT32
    if len(block) < _BLOCK:
        _add_block(block, f, scratch, row, ends)
        return
    low, high = _extremes(block, f)
    lowest, highest = np.int64(as_type(low + f.one, f.one) >> f.mantissa_bits), np.int64(high >> f.mantissa_bits)
    if high == f.zero:
        row[ZEROS] += len(block)
        return
    span = highest - lowest
    if lowest == 0 or highest == f.highest_field or span >= planes.WINDOW:
        _add_block(block, f, scratch, row, ends)
        return
    first, blocks = window.state
    if blocks == planes.MOST_BLOCKS or lowest < first or highest >= first + planes.WINDOW:
        _empty_planes(window, row)
        # As much room below as above, for the blocks to come.
        first = max(lowest - (planes.WINDOW - 1 - span) // 2, 1)
        blocks = 0
        window.state[0] = first
    planes.add_block(block, np.uint32(first), scratch.groups, window.planes, blocks)
    window.state[1] = blocks + 1
    _find_edges(block, f, f.first, lowest, highest, scratch, row)
    ends[0] = min(ends[0], low)
    ends[1] = max(ends[1], high)


@compiled
def _new_window() -> Any:
    # No block lies in a window that begins beyond all fields.
    state = np.array([_FORMAT32.highest_field + 1, 0])
    return _Window(np.zeros((planes.ROWS, planes.COLUMNS), np.uint32), np.empty(32, np.uint32), state)


@compiled
def _new_scratch() -> Any:
    integers = np.empty(_BLOCK, np.float32)
    return _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint32), integers, integers.view(np.uint32))


@compiled
def add_float32(bits: Any, row: Any, ends: Any) -> None:
    """Add float32 values to a NARROW row, but for its two extremes, which go to ``ends``.

    Args:
        bits: uint32, one-dimensional, contiguous.
        row: int64, shape (NARROW.length,).
        ends: uint32, shape (2,): the least non-zero magnitude minus one and the largest finite one so far; to begin with
            2^32 - 1 and 0.
    """
    scratch, window = _new_scratch(), _new_window()
    for start in range(0, len(bits), _BLOCK):
        _add_block32(bits[start : start + _BLOCK], scratch, window, row, ends)
    _empty_planes(window, row)


@compiled
def add_float64(bits: Any, row: Any, ends: Any) -> None:
    """The same for float64 values: uint64 bits and ends, and a WIDE row."""
    integers = np.empty(_BLOCK, np.float64)
    scratch = _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint64), integers, integers.view(np.uint64))
    for start in range(0, len(bits), _BLOCK):
        _add_block(bits[start : start + _BLOCK], _FORMAT64, scratch, row, ends)


@compiled
def add_float16(bits: Any, row: Any, ends: Any) -> None:
    """The same for float16 values: uint16 bits; row and ends as for float32."""
    scratch, window = _new_scratch(), _new_window()
    wide = np.empty(_BLOCK, np.uint32)
    for start in range(0, len(bits), _BLOCK):
        narrow = bits[start : start + _BLOCK]
        # A subnormal is its mantissa, an integer, times 2^-24. No subnormal float32 occurs on the way.
        for j in range(len(narrow)):
            scratch.integers[j] = np.float32(narrow[j] & np.uint16(0x3FF))
        for j in range(len(narrow)):
            magnitude = np.uint32(narrow[j] & np.uint16(0x7FFF))
            shifted = np.uint32(magnitude << np.uint32(13))
            normal = np.uint32(shifted + np.uint32((224 if magnitude >= np.uint32(0x7C00) else 112) << 23))
            subnormal = np.uint32(scratch.of_integers[j] - np.uint32(24 << 23)) if magnitude else np.uint32(0)
            wide[j] = normal if magnitude >= np.uint32(0x400) else subnormal
        _add_block32(wide[: len(narrow)], scratch, window, row, ends)
    _empty_planes(window, row)


@compiled
def add_bfloat16(bits: Any, row: Any, ends: Any) -> None:
    """The same for bfloat16 values: uint16 bits; row and ends as for float32."""
    scratch, window = _new_scratch(), _new_window()
    wide = np.empty(_BLOCK, np.uint32)
    for start in range(0, len(bits), _BLOCK):
        narrow = bits[start : start + _BLOCK]
        for j in range(len(narrow)):
            wide[j] = np.uint32(np.uint32(narrow[j]) << np.uint32(16))
        _add_block32(wide[: len(narrow)], scratch, window, row, ends)
    _empty_planes(window, row)
