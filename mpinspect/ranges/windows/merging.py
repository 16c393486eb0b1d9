"""Merges the columns of several windows into one window's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpinspect.ranges.windows.columns import (
    PER_BIN,
    PER_PEAK,
    SIGNIFICANDS,
    Column,
    Context,
    Lost,
    TensorColumns,
    narrowed,
)
from mpinspect.ranges.windows.tensors import TensorKey


def merge_columns(parts: Sequence[TensorColumns]) -> TensorColumns:
    """Merge several windows' tensors into one window's, like ``merge_tensor_windows`` but for all tensors at once.

    Raises:
        ValueError: parts is empty.
    """
    if len(parts) < 2:
        return _only(parts)
    order, places = _common_order(parts)
    tensors = len(order)
    merged: dict[str, Column] = {}
    for name in ("samples", "zeros", "infs", "nans"):
        merged[name] = np.zeros(tensors, dtype=np.int64)
        for part, place in zip(parts, places, strict=True):
            merged[name][place] += part.columns[name]
    merged["numel_max"] = np.zeros(tensors, dtype=np.int64)
    for part, place in zip(parts, places, strict=True):
        merged["numel_max"][place] = np.maximum(merged["numel_max"][place], part.columns["numel_max"])
    merged |= _merged_bins(parts, places, tensors)
    merged |= _merged_peaks(parts, places, tensors)
    contexts, context = _merged_contexts(parts, places, tensors)
    return TensorColumns(order, merged, contexts, context, _merged_lost_updates(parts, places))


def _only(parts: Sequence[TensorColumns]) -> TensorColumns:
    if not parts:
        raise ValueError("there is nothing to merge")
    return parts[0]


def _common_order(parts: Sequence[TensorColumns]) -> tuple[tuple[TensorKey, ...], list[Column]]:
    """Return all keys, in order of first appearance, and the positions of each part's tensors among them."""
    first = parts[0].order
    # Sessions of several ranks have equal orders, but not the same object.
    if all(part.order == first for part in parts):
        return first, [np.arange(len(first))] * len(parts)
    positions: dict[TensorKey, int] = {}
    places: dict[int, Column] = {}
    for part in parts:
        if id(part.order) not in places:
            found = [positions.setdefault(key, len(positions)) for key in part.order]
            places[id(part.order)] = np.array(found, dtype=np.intp)
    order = first if len(positions) == len(first) else tuple(positions)
    return order, [places[id(part.order)] for part in parts]


def _merged_bins(parts: Sequence[TensorColumns], places: Sequence[Column], tensors: int) -> dict[str, Column]:
    low = np.full(tensors, np.iinfo(np.int64).max)
    high = np.full(tensors, np.iinfo(np.int64).min)
    spans = [_Span.of(part, place) for part, place in zip(parts, places, strict=True)]
    for span in spans:
        low[span.place] = np.minimum(low[span.place], span.low)
        high[span.place] = np.maximum(high[span.place], span.high)
    has_values = low <= high
    low, high = np.where(has_values, low, 0), np.where(has_values, high, -1)
    bins = high - low + 1
    joined = {name: np.zeros(int(bins.sum()), dtype=np.int64) for name in PER_BIN}
    smallest, largest = np.full(tensors, np.inf), np.zeros(tensors)
    # The index that each tensor's exponent 0 would have in the joined columns.
    origin = np.cumsum(bins) - bins - low
    for part, span in zip(parts, spans, strict=True):
        starts = np.cumsum(span.bins) - span.bins
        target = np.repeat(origin[span.place] + span.low - starts, span.bins)
        target += np.arange(len(target))
        for name in PER_BIN:
            # No index occurs twice in ``target``, since a key occurs once in a window.
            joined[name][target] += part.columns[name]
        lowest, highest = span.low == low[span.place], span.high == high[span.place]
        at = span.place[lowest]
        smallest[at] = np.minimum(smallest[at], span.min_significand[lowest])
        at = span.place[highest]
        largest[at] = np.maximum(largest[at], span.max_significand[highest])
    return {
        "min_exponent": low,
        "bins": bins,
        "min_significand": np.where(has_values, smallest, 1.0),
        "max_significand": np.where(has_values, largest, 1.0),
        **{name: narrowed(column) for name, column in joined.items()},
    }


class _Span(NamedTuple):
    """Exponent ranges of a part's tensors; tensors without a finite non-zero value are left out."""

    place: Column
    bins: Column
    low: Column
    high: Column
    min_significand: Column
    max_significand: Column

    @classmethod
    def of(cls, part: TensorColumns, place: Column) -> _Span:
        used = np.flatnonzero(part.columns["bins"])
        bins, low = (part.columns[name][used].astype(np.int64) for name in ("bins", "min_exponent"))
        return cls(place[used], bins, low, low + bins - 1, *(part.columns[name][used] for name in SIGNIFICANDS))


def _merged_peaks(parts: Sequence[TensorColumns], places: Sequence[Column], tensors: int) -> dict[str, Column]:
    """Return the peak columns, with the counts of equal exponents of a tensor added and its exponents ascending."""
    owners = np.concatenate(
        [np.repeat(place, part.columns["peaks"]) for part, place in zip(parts, places, strict=True)]
    )
    exponents, counts = (np.concatenate([part.columns[name] for part in parts]).astype(np.int64) for name in PER_PEAK)
    if not owners.size:
        return {"peaks": np.zeros(tensors, dtype=np.int64), "peak_exponents": exponents, "peak_counts": counts}
    by_owner = np.lexsort((exponents, owners))
    owners, exponents, counts = owners[by_owner], exponents[by_owner], counts[by_owner]
    is_first = np.ones(len(owners), dtype=bool)
    is_first[1:] = (owners[1:] != owners[:-1]) | (exponents[1:] != exponents[:-1])
    first = np.flatnonzero(is_first)
    return {
        "peaks": np.bincount(owners[first], minlength=tensors),
        "peak_exponents": exponents[first],
        "peak_counts": np.add.reduceat(counts, first),
    }


def _merged_contexts(
    parts: Sequence[TensorColumns], places: Sequence[Column], tensors: int
) -> tuple[tuple[Context, ...], Column]:
    """Return the merged contexts and each tensor's position among them.

    Each distinct pair of contexts is merged only once, however many tensors share it.
    """
    numbers: dict[Context, int] = {}
    merged = np.full(tensors, -1, dtype=np.int64)
    for part, place in zip(parts, places, strict=True):
        # One number for each pair: sorting numbers takes a third of sorting pairs.
        pairs = (merged[place] + 1) * len(part.contexts) + part.context
        met, which = np.unique(pairs, return_inverse=True)
        known = list(numbers)
        results = [
            part.contexts[new] if not before else known[before - 1].merged(part.contexts[new])
            for before, new in (divmod(pair, len(part.contexts)) for pair in met.tolist())
        ]
        found = [numbers.setdefault(context, len(numbers)) for context in results]
        merged[place] = np.array(found, dtype=np.int64)[which.reshape(-1)]
    return _used_contexts(tuple(numbers), merged)


def _used_contexts(contexts: tuple[Context, ...], context: Column) -> tuple[tuple[Context, ...], Column]:
    """Return the contexts that tensors still have after merging, and each tensor's new position among them."""
    is_used = np.bincount(context, minlength=len(contexts)) > 0
    return tuple(contexts[number] for number in np.flatnonzero(is_used).tolist()), (np.cumsum(is_used) - 1)[context]


def _merged_lost_updates(parts: Sequence[TensorColumns], places: Sequence[Column]) -> tuple[Lost, ...]:
    sums: dict[tuple[int, str], Lost] = {}
    for part, place in zip(parts, places, strict=True):
        for position, name, lost, nonzero, measured in part.lost_updates:
            at = int(place[position]), name
            before = sums.get(at)
            if before is not None:
                lost, nonzero = lost + before.lost, nonzero + before.nonzero
                measured = measured and before.measured
            sums[at] = Lost(*at, lost, nonzero, measured)
    return tuple(sums.values())
