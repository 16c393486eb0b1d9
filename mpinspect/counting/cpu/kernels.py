"""The loops that count, compiled by numba: one pass over the bits, block by block in the first-level cache.

Adding to one of hundreds of counters takes five cycles a value, since neighbouring values often share a counter and so wait
for each other. These loops therefore avoid scattered additions. Blocks of float32 words whose exponents lie close together,
as gradients' usually do, are added to the ``planes``. In other blocks each exponent field between the block's extremes is
counted by comparing the whole block with it, many values to an instruction.

Rare values are searched in groups. Each mantissa is shifted to the top and decremented, so that powers of two sort above values
near the top of their exponent. Only groups whose largest result reaches that range are examined value by value.

numba widens integers unless each result is cast back, and does not vectorise a loop whose index might be negative:
hence the casts, and slices instead of offsets. Functions refer to each other as globals, never as closures, so that numba
finds them again in its cache on disk. All arithmetic is on integers, so that neither rounding nor a flush-denormals
mode of the thread can change a count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from mpinspect.counting.cpu import planes
from mpinspect.counting.cpu.compiling import compiled
from mpinspect.counting.cpu.memory import as_type, bits_of_float64, lowest_one, ones, pointer
from mpinspect.counting.cpu.vectors import LANES as _LANES
from mpinspect.counting.layout import HEADER, INFS, MAX_BITS, MIN_BITS, NANS, NO_MINIMUM, ZEROS

carray: Any = numba.carray  # type: ignore[attr-defined]

# Value i of a block belongs to group i modulo _GROUPS, except in the planes.
_BLOCK, _GROUPS = planes.BLOCK, planes.COLUMNS
#: Exponents of one block that are counted by comparison; values of lower exponents are added one by one.
_MOST_COMPARED = 64
#: Most values that are counted one by one: more cost as much as a block.
_FEW = 512
#: Most groups of one block that are examined value by value; beyond this, comparing the whole block costs less.
_MOST_GROUPS = 64


class _Format(NamedTuple):
    """An IEEE encoding. Fields are unsigned integers as wide as a value, except the last three, which are int64.

    ``turn`` shifts sign and field out at the top. A turned mantissa minus one of at least ``suspicious`` needs examination.
    ``first`` is the place of field 0's counters in a row, for plain values; ``first_of_integers`` for subnormals that were
    converted to integers. ``highest_field`` belongs to infinities and NaNs.
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
    """Arrays of a block's length, except ``groups``. ``of_integers`` views the floats in ``integers`` as words."""

    fields: Any
    groups: Any
    integers: Any
    of_integers: Any


class _Window(NamedTuple):
    """The planes, and the blocks that they hold.

    ``state``, int64: the lowest and the highest exponent field of the blocks; their number; the index in ``lower`` of the
    current lower planes. ``masks``: a block's sixteen masks, four to a word. ``padded``: a block.
    """

    planes: Any
    lower: Any
    masks: Any
    totals: Any
    padded: Any
    state: Any


_LOWEST, _HIGHEST, _BLOCKS, _SIDE = range(4)


_FORMAT32, _FORMAT64 = _format(np.uint32, 23, 127), _format(np.uint64, 52, 1023)


@compiled
def _survey(bits: Any, f: Any, fields: Any, groups: Any) -> Any:
    """Compute a block's fields and groups' maxima; return its least magnitude minus one, and its largest magnitude."""
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
def copy(values: Any, to: Any) -> None:
    """Copy one-dimensional arrays' values. numba's own assignment checks shapes, which takes seconds to compile."""
    for i in range(len(values)):
        to[i] = values[i]


@compiled
def _occurrences(fields: Any, field: Any) -> Any:
    found = np.uint16(0)
    for j in range(len(fields)):
        found = np.uint16(found + np.uint16(fields[j] == field))
    return np.int64(found)


@compiled
def _add_fields(fields: Any, f: Any, first: Any, lowest: Any, highest: Any, row: Any) -> None:
    """Count a block's fields, which lie within ``lowest`` .. ``highest`` except for zeros."""
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
    """Move powers of two and values near the top from the counters of other values to their own."""
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
    """Do the same for blocks with many such values. Overwrites ``fields``."""
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
    """Move the values that the groups' maxima reveal to the edge counters. Overwrites ``scratch.fields``."""
    suspicious = 0
    for j in range(len(scratch.groups)):
        suspicious += scratch.groups[j] >= f.suspicious
    if suspicious > _MOST_GROUPS and highest - lowest <= _MOST_COMPARED:
        _move_many_to_edges(block, f, first, lowest, highest, scratch.fields[: len(block)], row)
    elif suspicious:
        _move_to_edges(block, f, first, scratch.groups, row)


@compiled
def _add_values(block: Any, f: Any, first: Any, scratch: Any, row: Any) -> Any:
    """Count a block, subnormals as zeros and infinities as NaNs. Returns the result of ``_survey``.

    Args:
        first: the place of field 0's counters.
    """
    fields = scratch.fields[: len(block)]
    low, high = _survey(block, f, fields, scratch.groups)
    lowest, highest = np.int64(as_type(low + f.one, f.one) >> f.mantissa_bits), np.int64(high >> f.mantissa_bits)
    _add_fields(fields, f, first, lowest, highest, row)
    _find_edges(block, f, first, lowest, highest, scratch, row)
    return low, high


@compiled
def _move_subnormals(bits: Any, f: Any, scratch: Any, row: Any) -> None:
    """Move subnormals, which were counted as zeros, to their exponents, edges included.

    A subnormal is an integer times a power of two. That integer, as a float, is a normal number with the same significand.
    """
    integers = scratch.integers[: len(bits)]
    for j in range(len(bits)):
        magnitude = as_type(bits[j] & f.mask, f.one)
        integers[j] = np.int64(f.zero if magnitude > f.mantissa else magnitude)
    # The whole block is counted again, with all other values as zeros.
    row[ZEROS] -= len(bits)
    _add_values(scratch.of_integers[: len(bits)], f, f.first_of_integers, scratch, row)


@compiled
def _move_infinities(bits: Any, f: Any, row: Any) -> Any:
    """Move infinities, which were counted as NaNs, to their counter; return the largest finite magnitude."""
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
def _add_block(block: Any, f: Any, scratch: Any, row: Any, ends: Any) -> Any:
    """Count a block. Returns the result of ``_survey``, infinities and NaNs included."""
    low, high = _add_values(block, f, f.first, scratch, row)
    if low < f.mantissa:
        _move_subnormals(block, f, scratch, row)
    ends[0] = min(ends[0], low)
    ends[1] = max(ends[1], _move_infinities(block, f, row) if high >= f.infinity else high)
    return low, high


@compiled
def _fields(low: Any, high: Any) -> Any:
    """Return the exponent fields of float32 extremes in the form that ``_survey`` returns."""
    f = _FORMAT32
    return np.int64(as_type(low + f.one, f.one) >> f.mantissa_bits), np.int64(high >> f.mantissa_bits)


@compiled
def _fits_a_window(lowest: Any, highest: Any) -> Any:
    return lowest > 0 and highest < _FORMAT32.highest_field and highest - lowest < planes.WINDOW


@compiled
def _empty_planes(window: Any, row: Any) -> None:
    """Add the counts in the planes to the row, and clear the planes."""
    lowest, highest, blocks = window.state[_LOWEST], window.state[_HIGHEST], window.state[_BLOCKS]
    if not blocks:
        return
    lower = window.lower[window.state[_SIDE]]
    for k in range(planes.LOWER):
        copy(lower[k], window.planes[k])
    planes.take(window.planes, blocks, window.totals)
    zeros = blocks * _BLOCK
    for field in range(lowest, highest + 1):
        found = np.int64(window.totals[field % planes.WINDOW])
        row[_FORMAT32.first + 3 * field + 1] += found
        zeros -= found
    row[ZEROS] += zeros
    lower[:] = np.uint32(0)
    window.state[_BLOCKS] = 0


@compiled
def move_to_edge(row: Any, field: Any, is_near_next: Any) -> None:
    """Move a float32 value, a power of two or near the next one, from the counter of its field to its own."""
    counters = _FORMAT32.first + 3 * field
    row[counters + 1] -= 1
    row[counters + 2 * is_near_next] += 1


@compiled
def add_fields(row: Any, lowest: Any, counts: Any) -> None:
    """Add numbers of float32 values by exponent field, from a lowest one on."""
    for k in range(len(counts)):
        row[_FORMAT32.first + 3 * (lowest + k) + 1] += counts[k]


@compiled
def extend_ends(ends: Any, least: Any, largest: Any) -> None:
    """Let a counting's ends include two doubled magnitudes, neither of them zero."""
    f = _FORMAT32
    ends[0] = min(ends[0], np.uint32(np.uint32(np.uint32(least) >> f.one) - f.one))
    ends[1] = max(ends[1], np.uint32(np.uint32(largest) >> f.one))


@compiled
def _move_columns_to_edges(bits: Any, masks: Any, row: Any) -> None:
    """Move powers of two and values near the top of a block in the planes to their own counters."""
    f = _FORMAT32
    for word in range(len(masks)):
        mask = masks[word]
        while mask:
            place = lowest_one(mask)
            mask = np.uint64(mask & np.uint64(mask - np.uint64(1)))
            # Four masks to a word.
            start = (4 * word + place // _LANES) * planes.COLUMNS + place % _LANES
            for index in range(start, start + planes.COLUMNS, _LANES):
                magnitude = np.uint32(bits[index] & f.mask)
                rest = np.uint32(magnitude & f.mantissa)
                if magnitude and (rest == f.zero or rest >= f.near_top):
                    move_to_edge(row, np.int64(magnitude >> f.mantissa_bits), rest != f.zero)


@compiled
def _find_edges_in_planes(block: Any, masks: Any, lowest: Any, highest: Any, scratch: Any, row: Any) -> None:
    """Move the values that a block's masks reveal to the edge counters."""
    suspicious = 0
    for mask in masks:
        suspicious += ones(mask)
    if suspicious > _MOST_GROUPS:
        _move_many_to_edges(block, _FORMAT32, _FORMAT32.first, lowest, highest, scratch.fields, row)
    elif suspicious:
        _move_columns_to_edges(block, masks, row)


@compiled
def without_owner(array: Any) -> Any:
    """Return a view of the array's memory without a reference to its owner, which saves reference counting in loops."""
    return carray(pointer(array.ctypes.data, array.dtype.type(0)), array.shape)


@compiled
def _add_fitting_blocks(bits: Any, counting: Any) -> Any:
    """Add whole blocks of float32 words to the planes, up to one that fits no window; return the number of values added."""
    f, window, state = _FORMAT32, counting.window, counting.window.state
    all_planes, lower, masks = without_owner(window.planes), without_owner(window.lower), without_owner(window.masks)
    row, lower_at, size = (
        without_owner(counting.row),
        np.int64(lower.ctypes.data),
        (planes.LOWER + 1) * planes.ROW_BYTES,
    )
    lowest, highest, blocks, side = state[_LOWEST], state[_HIGHEST], state[_BLOCKS], state[_SIDE]
    least, largest = np.uint32(2**32 - 1), f.zero
    start = 0
    while start + _BLOCK <= len(bits):
        block = bits[start : start + _BLOCK]
        low, high = planes.add_block(
            block.ctypes.data, lower_at + side * size, lower_at + (1 - side) * size, masks.ctypes.data
        )
        if high == f.zero:
            row[ZEROS] += _BLOCK
            start += _BLOCK
            continue
        # Both extremes are doubled.
        first, last = np.int64(low >> np.uint32(24)), np.int64(high >> np.uint32(24))
        if not _fits_a_window(first, last):
            break
        if blocks == 0:
            lowest, highest = first, last
        elif blocks == planes.MOST_BLOCKS or max(last, highest) - min(first, lowest) >= planes.WINDOW:
            state[_LOWEST], state[_HIGHEST], state[_BLOCKS], state[_SIDE] = lowest, highest, blocks, side
            _empty_planes(window, counting.row)
            blocks = 0
            # Add the same block again, now to empty planes.
            continue
        side = 1 - side
        carries = lower_at + side * size + planes.LOWER * planes.ROW_BYTES
        planes.add_carries(np.int64(all_planes.ctypes.data), carries, blocks)
        lowest, highest, blocks = min(first, lowest), max(last, highest), blocks + 1
        _find_edges_in_planes(block, masks, first, last, counting.scratch, row)
        least, largest = min(least, low), max(largest, high)
        start += _BLOCK
    state[_LOWEST], state[_HIGHEST], state[_BLOCKS], state[_SIDE] = lowest, highest, blocks, side
    if largest != f.zero:
        extend_ends(counting.ends, least, largest)
    return start


@compiled
def _add_words(bits: Any, counting: Any) -> None:
    """Count float32 words."""
    start = 0
    while start < len(bits):
        if start + _BLOCK <= len(bits):
            start += _add_fitting_blocks(bits[start:], counting)
            # After a block that did not fit, the next one is unlikely to fit.
            while start + _BLOCK <= len(bits):
                low, high = _add_block(
                    bits[start : start + _BLOCK], _FORMAT32, counting.scratch, counting.row, counting.ends
                )
                start += _BLOCK
                if _fits_a_window(*_fields(low, high)):
                    break
        else:
            _add_part_of_a_block(bits[start:], counting)
            start = len(bits)


@compiled
def _add_few(bits: Any, counting: Any) -> None:
    """Count a few float32 words one by one."""
    f, row, ends = _FORMAT32, counting.row, counting.ends
    for j in range(len(bits)):
        magnitude = np.uint32(bits[j] & f.mask)
        if magnitude == f.zero:
            row[ZEROS] += 1
            continue
        ends[0] = min(ends[0], np.uint32(magnitude - f.one))
        if magnitude >= f.infinity:
            row[INFS if magnitude == f.infinity else NANS] += 1
            continue
        ends[1] = max(ends[1], magnitude)
        field, rest, first = np.int64(magnitude >> f.mantissa_bits), np.uint32(magnitude & f.mantissa), f.first
        if field == 0:
            # A subnormal is an integer times a power of two: move its highest one to the place of a normal value's.
            first, field = f.first_of_integers, np.int64(127 + 23)
            while rest <= f.mantissa:
                rest, field = np.uint32(rest << f.one), field - 1
            rest = np.uint32(rest & f.mantissa)
        row[first + 3 * field + (0 if rest == f.zero else 2 if rest >= f.near_top else 1)] += 1


@compiled
def _add_part_of_a_block(bits: Any, counting: Any) -> None:
    """Count less than a block of float32 words: one by one if they are few, else padded with zeros to a block."""
    if len(bits) <= _FEW:
        _add_few(bits, counting)
        return
    padded = counting.window.padded
    copy(bits, padded)
    padded[len(bits) :] = np.uint32(0)
    if _add_fitting_blocks(padded, counting):
        counting.row[ZEROS] -= _BLOCK - len(bits)
    else:
        _add_block(bits, _FORMAT32, counting.scratch, counting.row, counting.ends)


@compiled
def _new_window() -> Any:
    return _Window(
        np.zeros((planes.ROWS, planes.COLUMNS), np.uint32),
        np.zeros((2, planes.LOWER + 1, planes.COLUMNS), np.uint32),
        np.empty(4, np.uint64),
        np.empty(32, np.uint32),
        np.empty(_BLOCK, np.uint32),
        np.zeros(4, np.int64),
    )


@compiled
def _new_scratch() -> Any:
    integers = np.empty(_BLOCK, np.float32)
    return _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint32), integers, integers.view(np.uint32))


class _Counting(NamedTuple):
    """The state of one thread that counts values into a row.

    Args:
        row: int64, shape (NARROW.length,) or (WIDE.length,), initially zeros.
        ends: unsigned integers as wide as a value, shape (2,): the least non-zero magnitude minus one, initially all bits,
            and the largest finite magnitude, initially 0. ``finish`` writes them to the row.
        wide: uint32, shape (_BLOCK,): scratch for narrower values as float32 words.
    """

    row: Any
    ends: Any
    scratch: Any
    window: Any
    wide: Any


@compiled
def counting32(row: Any) -> Any:
    """Return the state for counting float32, float16 or bfloat16 values into a NARROW row."""
    ends = np.zeros(2, np.uint32)
    ends[0] = np.uint32(2**32 - 1)
    return _Counting(row, ends, _new_scratch(), _new_window(), np.empty(_BLOCK, np.uint32))


@compiled
def continued(counting: Any, row: Any) -> Any:
    """Return the state of ``counting32`` after ``finish32``, for counting into another row with the same scratch memory."""
    counting.ends[0], counting.ends[1] = np.uint32(2**32 - 1), np.uint32(0)
    return _Counting(row, counting.ends, counting.scratch, counting.window, counting.wide)


@compiled
def without_owners(counting: Any) -> Any:
    """Return the state of ``counting32`` as views without reference counts; the caller must hold that state."""
    scratch, window = counting.scratch, counting.window
    return _Counting(
        without_owner(counting.row),
        without_owner(counting.ends),
        _Scratch(
            without_owner(scratch.fields),
            without_owner(scratch.groups),
            without_owner(scratch.integers),
            without_owner(scratch.of_integers),
        ),
        _Window(
            without_owner(window.planes),
            without_owner(window.lower),
            without_owner(window.masks),
            without_owner(window.totals),
            without_owner(window.padded),
            without_owner(window.state),
        ),
        without_owner(counting.wide),
    )


@compiled
def counting64(row: Any) -> Any:
    """Return the state for counting float64 values into a WIDE row."""
    ends = np.zeros(2, np.uint64)
    ends[0] = np.uint64(2**64 - 1)
    integers = np.empty(_BLOCK, np.float64)
    scratch = _Scratch(np.empty(_BLOCK, np.uint16), np.empty(_GROUPS, np.uint64), integers, integers.view(np.uint64))
    return _Counting(row, ends, scratch, None, None)


@compiled
def add_float32(counting: Any, address: Any, length: Any) -> None:
    """Count ``length`` float32 values at an address."""
    _add_words(carray(pointer(address, np.uint32(0)), (length,)), counting)


@compiled
def add_float64(counting: Any, address: Any, length: Any) -> None:
    """Count ``length`` float64 values at an address."""
    bits = carray(pointer(address, np.uint64(0)), (length,))
    for start in range(0, length, _BLOCK):
        _add_block(bits[start : start + _BLOCK], _FORMAT64, counting.scratch, counting.row, counting.ends)


@compiled
def widen(narrow: Any, is_bfloat16: Any, wide: Any, scratch: Any) -> None:
    """Write float16 or bfloat16 words to ``wide``, as float32 words."""
    for start in range(0, len(narrow), _BLOCK):
        part, target = narrow[start : start + _BLOCK], wide[start : start + _BLOCK]
        if is_bfloat16:
            for j in range(len(part)):
                target[j] = np.uint32(np.uint32(part[j]) << np.uint32(16))
        else:
            _widen_float16(part, target, scratch)


@compiled
def _widen_float16(narrow: Any, wide: Any, scratch: Any) -> None:
    # A subnormal is its mantissa, an integer, times 2^-24. No intermediate result is a subnormal float32.
    for j in range(len(narrow)):
        scratch.integers[j] = np.float32(narrow[j] & np.uint16(0x3FF))
    for j in range(len(narrow)):
        magnitude = np.uint32(narrow[j] & np.uint16(0x7FFF))
        shifted = np.uint32(magnitude << np.uint32(13))
        normal = np.uint32(shifted + np.uint32((224 if magnitude >= np.uint32(0x7C00) else 112) << 23))
        subnormal = np.uint32(scratch.of_integers[j] - np.uint32(24 << 23)) if magnitude else np.uint32(0)
        wide[j] = normal if magnitude >= np.uint32(0x400) else subnormal


@compiled
def add_narrow(counting: Any, address: Any, length: Any, is_bfloat16: Any) -> None:
    """Count ``length`` float16 or bfloat16 values at an address."""
    bits = carray(pointer(address, np.uint16(0)), (length,))
    for start in range(0, length, _BLOCK):
        narrow = bits[start : start + _BLOCK]
        widen(narrow, is_bfloat16, counting.wide, counting.scratch)
        _add_words(counting.wide[: len(narrow)], counting)


@compiled
def finish32(counting: Any) -> None:
    """Complete the row after the last value."""
    f, row, ends = _FORMAT32, counting.row, counting.ends
    _empty_planes(counting.window, row)
    least = np.uint32(ends[0] + f.one)
    row[MIN_BITS] = _as_float64(least) if ends[0] < np.uint32(f.infinity - f.one) else NO_MINIMUM
    row[MAX_BITS] = _as_float64(ends[1])


@compiled
def finish64(counting: Any) -> None:
    """Complete the row after the last value."""
    f, row, ends = _FORMAT64, counting.row, counting.ends
    row[MIN_BITS] = np.int64(ends[0]) + 1 if ends[0] < np.uint64(f.infinity - f.one) else NO_MINIMUM
    row[MAX_BITS] = np.int64(ends[1])


@compiled
def _as_float64(magnitude: Any) -> Any:
    """Return the float64 bits of the finite value with these float32 magnitude bits, by integer arithmetic."""
    if magnitude > _FORMAT32.mantissa:
        return (np.int64(magnitude) << 29) + ((1023 - 127) << 52)
    return bits_of_float64(np.float64(magnitude) * 2.0**-149)


@compiled
def add_rows(rows: Any, row: Any) -> None:
    """Add several rows to one. numba's own sum over an axis takes seconds to compile."""
    for k in range(len(rows)):
        for i in range(len(row)):
            row[i] += rows[k, i]


@compiled
def merge(rows: Any, row: Any) -> None:
    """Merge several rows into one: add counts, and take the minimum and maximum of the extremes."""
    copy(rows[0], row)
    for k in range(1, len(rows)):
        low, high = min(row[MIN_BITS], rows[k, MIN_BITS]), max(row[MAX_BITS], rows[k, MAX_BITS])
        add_rows(rows[k : k + 1], row)
        row[MIN_BITS], row[MAX_BITS] = low, high
