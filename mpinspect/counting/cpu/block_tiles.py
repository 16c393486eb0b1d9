"""A tile of blocks: sorts its vectors by class, adds their bits to planes, and takes the counts from the planes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpinspect.counting.cpu import block_layout as layout
from mpinspect.counting.cpu import kernels, planes
from mpinspect.counting.cpu.block_vectors import (
    add_higher,
    add_higher_exponents,
    add_lowest,
    add_lowest_exponents,
    add_plain,
    count_beyond,
    count_zeros,
    list_edges,
    measure,
    sort,
)
from mpinspect.counting.cpu.compiling import compiled
from mpinspect.counting.cpu.memory import pointer
from mpinspect.counting.cpu.vectors import LANES, VECTOR_BYTES
from mpinspect.counting.layout import ZEROS
from mpinspect.numeric.blocks import DISTANCES


class _Tile(NamedTuple):
    """Some blocks, and the planes of their distances.

    Args:
        words: uint32, float32 values of whole vectors; ``narrow``, uint16, the same in 16 bits; ``wide``, uint32, rows.
        chosen: some of the words, zeros in place of the others; ``places``, uint32, a tile's edges.
        tops: uint32, the largest doubled magnitude in each vector's block; ``halves``, half of it. ``zeros``, uint8, the zeros in
            each vector.
        numbers: int32, shape (CLASSES, ...): the numbers of the vectors in each class; ``limits``, uint32: their tops with all
            bits of the mantissa; ``edges``, uint16: for each sixteen of these vectors, the lanes with an edge.
        listed: int64, shape (CLASSES, 4): for each class, the addresses of these lists, and the number of vectors.
        windows: uint32, shape (WINDOWS, ...): the limit of each window of maxima, repeated; ``order``, int32: 0, 1, 2, ...
        sets: uint32, shape (SETS, SET_ROWS, planes.COLUMNS): lower planes with their carries, the other planes, and the state:
            as int64, the turns in the lower planes, and the blocks.
        found_zeros: int64, shape (COPIES, 256): counters of zeros by the exponent field of their block's largest magnitude;
            ``found_powers``, shape (COPIES, CLASSES * DISTANCES): of powers of two.
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
def place_of(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@compiled
def _aligned(array: Any) -> Any:
    """Return a line's number of elements less, from a line's begin on: a load waits for a store that crosses lines."""
    start = -place_of(array) % VECTOR_BYTES // array.itemsize
    return array[start : start + len(array) - VECTOR_BYTES]


@compiled
def new_tile(padded: Any) -> Any:
    # Whole groups of sixteen vectors.
    size = -(-max(layout.TILE, padded) // planes.COLUMNS) * planes.COLUMNS
    vectors = size // LANES
    listed, width = np.zeros((layout.CLASSES, 4), np.int64), vectors + LANES
    numbers = _aligned(np.zeros(layout.CLASSES * width + VECTOR_BYTES, np.int32))
    limits = _aligned(np.zeros(layout.CLASSES * width + VECTOR_BYTES, np.uint32))
    edges = np.zeros((layout.CLASSES, width // LANES), np.uint16)
    for c in range(layout.CLASSES):
        listed[c, 0], listed[c, 1] = place_of(numbers[c * width :]), place_of(limits[c * width :])
        listed[c, 2] = place_of(edges[c])
    turns = -(-vectors // planes.COLUMNS)
    windows = np.zeros((layout.WINDOWS, turns * LANES), np.uint32)
    for window in range(layout.WINDOWS):
        windows[window] = np.uint32(((layout.WINDOWS - window) * planes.WINDOW << layout.FIELD) - 1)
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
        _aligned(np.zeros(layout.SETS * layout.SET_BYTES // 4 + VECTOR_BYTES, np.uint32)),
        np.zeros((layout.COPIES, layout.WINDOWS * planes.WINDOW), np.int64),
        np.zeros((layout.COPIES, layout.CLASSES * DISTANCES), np.int64),
        np.zeros(layout.IN_WINDOW + planes.WINDOW, np.int64),
    )


@compiled
def without_owners(tile: Any) -> Any:
    """Return the tile as views without reference counts; the caller must hold the tile while they are used."""
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


@compiled
def _state_of(planes_at: Any) -> Any:
    """Return the state of the set of planes at an address."""
    return kernels.carray(pointer(planes_at + layout.STATE * planes.ROW_BYTES, np.int64(0)), (2,))


@compiled
def _rows_of(planes_at: Any) -> Any:
    return kernels.carray(pointer(planes_at, np.uint32(0)), (layout.SET_ROWS, planes.COLUMNS))


@compiled
def _take(planes_at: Any, counts_at: Any) -> None:
    """Add the counts in a set of planes to the counts of 32 distances, and clear the planes."""
    rows, state = _rows_of(planes_at), _state_of(planes_at)
    for k in range(planes.LOWER):
        kernels.copy(rows[k], rows[layout.UPPER + k])
    rows[: layout.UPPER] = np.uint32(0)
    totals = np.zeros(planes.WINDOW, np.uint32)
    planes.take(rows[layout.UPPER : layout.STATE], state[1], totals)
    counts = kernels.carray(pointer(counts_at, np.int64(0)), (planes.WINDOW,))
    for distance in range(planes.WINDOW):
        counts[distance] += np.int64(totals[distance])
    state[1] = 0


@compiled
def _end_block(planes_at: Any, counts_at: Any) -> None:
    """Carry from a set's lower planes after sixteen turns."""
    state = _state_of(planes_at)
    upper, carries = planes_at + layout.UPPER * planes.ROW_BYTES, planes_at + planes.LOWER * planes.ROW_BYTES
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
    return sets + layout.SET_BYTES * number


@compiled
def _counts_place(found: Any, number: Any) -> Any:
    """Return the address of the 32 counts that belong to a set, given the address of a result."""
    if number >= layout.REACHES * layout.CLASSES:
        return found + 8 * (layout.MAXIMA + (number - layout.REACHES * layout.CLASSES) * planes.WINDOW)
    return found + 8 * (number % layout.CLASSES * DISTANCES + number // layout.CLASSES * planes.WINDOW)


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
    planes_at, over, exponents_at = (
        _planes_place(sets, number),
        found + 8 * layout.OVER,
        _planes_place(sets, layout.EXPONENT_SET),
    )
    state, exponents, lowest = _state_of(planes_at), _state_of(exponents_at), np.int64(0)
    seen, turns = np.int64(0), -(-length // LANES)
    if window:
        lowest = _window_at(window)[layout.LOWEST]
    while turns > 0:
        now = min(turns, layout.TURNS - state[0])
        lower, others = planes_at + VECTOR_BYTES * state[0], exponents_at + VECTOR_BYTES * exponents[0]
        if window:
            now = min(now, layout.TURNS - exponents[0])
            if number:
                seen |= add_higher_exponents(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
            else:
                seen |= add_lowest_exponents(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
            exponents[0] += now
            if exponents[0] == layout.TURNS:
                _end_block(exponents_at, window + 8 * layout.IN_WINDOW)
        elif number >= layout.CLASSES:
            add_plain(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        elif number:
            seen |= add_higher(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        else:
            seen |= add_lowest(words, numbers, limits, now, lower, edges, over, ahead, others, lowest)
        state[0] += now
        if state[0] == layout.TURNS:
            _end_block(planes_at, _counts_place(found, number))
        numbers, limits, turns = numbers + VECTOR_BYTES * now, limits + VECTOR_BYTES * now, turns - now
        if number < layout.CLASSES:
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
    has_edges, found_at = np.int64(0), place_of(found)
    for c in range(layout.CLASSES):
        numbers, limits, edges, length = listed[c]
        has_edges |= _add_listed(words, numbers, limits, length, sets, c, edges, found_at, ahead, window)
        if most >= planes.WINDOW:
            first, none = np.int64(planes.WINDOW), np.int64(0)
            _add_listed(words, numbers, limits, length, sets, layout.CLASSES + c, first, found_at, ahead, none)
        if most >= DISTANCES and length:
            found[c * DISTANCES + DISTANCES - 1] += count_beyond(words, numbers, limits, length)
        ahead += VECTOR_BYTES * length
    return has_edges


@compiled
def _window_at(window: Any) -> Any:
    """Return the window at an address."""
    return kernels.carray(pointer(window, np.int64(0)), (layout.IN_WINDOW + planes.WINDOW,))


@compiled
def _empty_window(sets: Any, window: Any, row: Any) -> None:
    """Add the exponents in the planes to a row, and clear the planes.

    Args:
        sets: address of the sets of planes.
    """
    _empty(_planes_place(sets, layout.EXPONENT_SET), place_of(window) + 8 * layout.IN_WINDOW)
    counts = window[layout.IN_WINDOW :]
    kernels.add_fields(row, window[layout.LOWEST], counts)
    row[ZEROS] += window[layout.ELEMENTS] - counts.sum()
    counts[:] = 0
    window[layout.ELEMENTS] = 0


@compiled
def _move_window(sets: Any, window: Any, least: Any, highest: Any, row: Any) -> None:
    """Let the window contain two exponent fields, less than 32 apart."""
    if least < window[layout.LOWEST] or highest >= window[layout.LOWEST] + planes.WINDOW:
        _empty_window(sets, window, row)
        window[layout.LOWEST] = least - (planes.WINDOW - 1 - (highest - least)) // 2


@compiled
def _words_at(words: Any, length: Any) -> Any:
    return kernels.carray(pointer(words, np.uint32(0)), (length,))


@compiled
def _class(mantissa: Any) -> Any:
    found = 0
    for cut in layout.CUT_MANTISSAS:
        found += np.int64(mantissa) > cut
    return found


@compiled
def _add_subnormal_powers(tops: Any, values: Any, counts: Any) -> None:
    """Count the powers of two that are subnormals, whose distances exceed all bins."""
    for j in range(len(values)):
        magnitude = np.uint32(values[j] << np.uint32(1))
        if (
            magnitude
            and magnitude <= np.uint32(layout.MANTISSA)
            and not magnitude & np.uint32(magnitude - np.uint32(1))
        ):
            counts[1, _class(tops[j // LANES] & np.uint32(layout.MANTISSA)), DISTANCES - 1] += 1


@compiled
def _add_edges(words: Any, listed: Any, places: Any, found: Any, window: Any, row: Any) -> None:
    """Count a tile's powers of two that are not subnormals, where the adders found some, and with exponents all edges.

    Args:
        words, places: addresses of the words, and of memory for as many uint32s and a vector.
        found: int64, shape (layout.COPIES, layout.CLASSES * DISTANCES).
        window: not zero if exponents were added; ``row``: to which their edges are added.
    """
    number = np.int64(0)
    for c in range(layout.CLASSES):
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
        if edge < layout.NEAR_NEXT:
            found[j % layout.COPIES, edge & 255] += 1
        if window:
            kernels.move_to_edge(row, edge >> 8 & 255, edge >= layout.NEAR_NEXT)


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
    last = layout.WINDOWS - 1 - (least >> layout.FIELD) // planes.WINDOW
    for window in range(layout.WINDOWS - 1 - (highest >> layout.FIELD) // planes.WINDOW, last + 1):
        limits, number = windows + 4 * width * window, layout.REACHES * layout.CLASSES + window
        none = np.int64(0)
        _add_listed(halves, order, limits, groups, sets, number, none, place_of(found), none, none)
    if last == layout.WINDOWS - 1:
        # Zeros have the exponent field of subnormals.
        found[layout.ZEROS_AT - 1] -= end - groups * LANES + zeros


@compiled
def _add_zeros(tops: Any, zeros: Any, vectors: Any, found: Any) -> None:
    """Count the zeros of whole blocks by the exponent field of the largest magnitude.

    Args:
        tops, zeros: of blocks of so many vectors.
        found: int64, shape (layout.COPIES, 256).
    """
    for block in range(len(tops) // vectors):
        zero = np.int64(0)
        for vector in range(np.uint64(block * vectors), np.uint64((block + 1) * vectors)):
            zero += zeros[vector]
        found[
            np.uint64(block % layout.COPIES), np.uint64(tops[np.uint64(block * vectors)] >> np.uint32(layout.FIELD))
        ] += zero


@compiled
def _normalised(magnitude: Any) -> Any:
    """Return a doubled magnitude as if its exponent had no least value: exponent field, and 24 bits of mantissa."""
    field, mantissa = np.int64(magnitude) >> layout.FIELD, np.int64(magnitude) & layout.MANTISSA
    if field == 0:
        while mantissa <= layout.MANTISSA:
            mantissa <<= 1
            field -= 1
        # A subnormal has the exponent of field 1.
        return field + 1, mantissa & layout.MANTISSA
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
            for k in range(len(layout.CUT_MANTISSAS)):
                found[layout.OVER + k] += distance == 0 and mantissa > layout.CUT_MANTISSAS[k]


@compiled
def _add_others(tile: Any, values: Any, blocks: Any, vectors: Any, found: Any) -> Any:
    """Count the blocks that are not in the planes; return the address of the words with zeros in their place."""
    size = vectors * LANES
    for j in range(len(values)):
        tile.chosen[j] = values[j]
    for block in range(blocks):
        top = tile.tops[block * vectors]
        field = top >> np.uint32(layout.FIELD)
        if not layout.LEAST_FIELD <= field <= layout.MOST_FIELD:
            if layout.TINY_FIELD <= field < layout.BROKEN_FIELD:
                _add_one_by_one(values[block * size : (block + 1) * size], top, found)
            tile.chosen[block * size : (block + 1) * size] = np.uint32(0)
    return place_of(tile.chosen)


@compiled
def _counts_of(found: Any) -> Any:
    return found[: layout.MAXIMA].reshape(layout.KINDS, layout.CLASSES, DISTANCES)


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
def add_tiles(
    tile: Any, words: Any, blocks: Any, vectors: Any, ahead: Any, found: Any, counting: Any, is_alone: Any
) -> None:
    """Count blocks of so many vectors, from an address with words of whole groups of sixteen vectors, a tile at a time.

    Args:
        ahead: how many bytes after the words to prefetch meanwhile.
        counting: counts the exponents; ``is_alone``: they are counted already, or not at all.
    """
    most = max(layout.TILE // (LANES * vectors), 1)
    is_shared = vectors <= LANES and not vectors & (vectors - 1)
    tops, sets, listed, window = place_of(tile.tops), place_of(tile.sets), place_of(tile.listed), tile.window
    row = counting.row
    maxima = place_of(tile.halves), place_of(tile.order), place_of(tile.windows), tile.windows.shape[1]
    while blocks > 0:
        now = min(blocks, most)
        length, groups = now * vectors, -(-now * vectors // LANES)
        least = measure(words, tops, groups, vectors if is_shared else 1)
        if not is_shared:
            _spread_tops(tile.tops[:length], vectors)
        if least == 0:
            least = count_zeros(words, place_of(tile.zeros), length)
            _add_zeros(tile.tops[:length], tile.zeros, vectors, tile.found_zeros)
        inside, lowest, highest, zeros = sort(tops, maxima[0], listed, groups)
        # The padding of the last group has only zeros, too.
        found[layout.ZERO] += (zeros - (groups * LANES - length)) // vectors
        if highest:
            _add_maxima(maxima, sets, groups, lowest, highest, zeros, found)
        values, counted = _words_at(words, groups * planes.COLUMNS), words
        most_distant, window_at = (highest >> layout.FIELD) - (least >> layout.FIELD), np.int64(0)
        is_apart = inside + zeros < groups * LANES or most_distant >= planes.WINDOW
        window[layout.IS_APART] = is_apart
        if not is_alone and is_apart:
            kernels.add_float32(counting, words, length * LANES)
        elif not is_alone:
            window_at = place_of(window)
            if highest:
                _move_window(sets, window, least >> layout.FIELD, highest >> layout.FIELD, row)
                kernels.extend_ends(counting.ends, least, highest)
            window[layout.ELEMENTS] += length * LANES
        if inside + zeros < groups * LANES:
            counted = _add_others(tile, values, now, vectors, found)
        if inside:
            if _add_classes(counted, words + ahead, tile.listed, sets, found, most_distant, window_at):
                _add_edges(counted, tile.listed, place_of(tile.places), tile.found_powers, window_at, row)
            if least <= layout.MANTISSA:
                _add_subnormal_powers(tile.tops, _words_at(counted, len(values)), _counts_of(found))
        words, blocks = words + VECTOR_BYTES * length, blocks - now


@compiled
def finish(tile: Any, found: Any, row: Any) -> None:
    """Count what the planes still hold, and add the copies of counters."""
    for number in range(layout.EXPONENT_SET):
        _empty(_planes_place(place_of(tile.sets), number), _counts_place(place_of(found), number))
    _empty_window(place_of(tile.sets), tile.window, row)
    kernels.add_rows(tile.found_powers, found[layout.CLASSES * DISTANCES : layout.MAXIMA])
    kernels.add_rows(tile.found_zeros, found[layout.ZEROS_AT : layout.OVER])
