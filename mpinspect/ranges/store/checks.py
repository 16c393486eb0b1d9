"""Checks that a window's columns hold possible counts, so that later code can rely on them unchecked."""

from __future__ import annotations

import numpy as np

from mpinspect.ranges.windows.columns import PER_BIN, SIGNIFICANDS, Column, TensorColumns
from mpinspect.ranges.windows.tensors import LARGEST_EXPONENT
from mpinspect.runtime.decoding import DecodingError

#: Largest unpacked window in bytes: 1 KiB (three times the size of 40 exponents) for each of MOST_TENSORS.
LARGEST_WINDOW = 256 << 20
#: Largest total of a file's unpacked windows in bytes: 32 windows of 65,536 tensors with 40 exponents each.
LARGEST_WINDOWS = 1 << 30
#: Maximum number of bins of all tensors over the whole run (three int64 each in analysis): 128 exponents of 262,144 tensors.
MOST_BINS = 1 << 25
#: Maximum number of tensors of a run.
MOST_TENSORS = 1 << 18
#: Maximum number of elements in all bins of a file together, so that int64 sums do not overflow.
MOST_ELEMENTS = 2.0**62
#: The largest float64 below 2.
_LARGEST_SIGNIFICAND = 2.0 - 2.0**-52
_SUMMED = ("samples", "zeros", "infs", "nans", "peak_counts")


def check_counts(tensors: TensorColumns) -> None:
    """Raise DecodingError if a column holds a value that no tensor can have. Assumes columns of matching lengths."""
    columns = tensors.columns
    for name in (*_SUMMED, *PER_BIN, "numel_max", "bins", "peaks"):
        _require(not columns[name].size or bool(columns[name].min() >= 0), f"has a negative number in {name!r}")
    for name in ("min_exponent", "peak_exponents"):
        _require(_within(columns[name], -LARGEST_EXPONENT, LARGEST_EXPONENT), f"has an impossible number in {name!r}")
    for name in SIGNIFICANDS:
        _require(_within(columns[name], 1.0, _LARGEST_SIGNIFICAND), f"has an impossible number in {name!r}")
    bins = columns["bins"].astype(np.int64)
    _require(bool((bins + columns["min_exponent"] <= LARGEST_EXPONENT).all()), "has more bins than there are exponents")
    counts, powers, tops = (columns[name] for name in PER_BIN)
    # The difference, since the sum of two narrow integers may not fit their type.
    _require(bool((powers <= counts - tops).all()), "counts more powers of two and near tops than values")
    used = np.flatnonzero(bins)
    ends = np.cumsum(bins)[used]
    _require(bool(counts[ends - 1].all() and counts[ends - bins[used]].all()), "has an empty bin at an end")
    _require(bool(columns["peak_counts"].all()), "has a peak that no sample had")
    for lost in tensors.lost_updates:
        _require(lost.position < len(tensors.order), "has lost updates of a tensor that is not there")


def _within(column: Column, low: float, high: float) -> bool:
    """Return whether every number lies in low..high; NaN does not."""
    return not column.size or bool(low <= column.min() and column.max() <= high)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DecodingError(otherwise)


def _sum(column: Column) -> float:
    """Return the sum of a non-negative column; int64 columns are summed in float64, since an int64 could overflow."""
    return float(column.sum(dtype=np.float64 if column.itemsize == 8 else np.int64))


class Limits:
    """Adds up the memory and the counts of one file's windows and checks the totals against the limits above."""

    def __init__(self) -> None:
        self._bytes_left = LARGEST_WINDOWS
        self._elements = 0.0
        #: By tensor number, the lowest exponent and one past the highest. Merged windows have every bin between them.
        self._low, self._high = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    @property
    def largest(self) -> int:
        """The largest size in bytes that the next window may unpack to."""
        return min(LARGEST_WINDOW, self._bytes_left)

    def take(self, numbers: Column, tensors: TensorColumns, bytes_taken: int) -> None:
        """Add a window to the totals; raise DecodingError if they exceed a run's limits.

        Args:
            numbers: the tensors' numbers, which are the same in all windows of the file.
            tensors: the window's columns, already checked by ``check_counts``.
            bytes_taken: unpacked size of the window's payload.
        """
        self._bytes_left -= bytes_taken
        self._elements += sum(_sum(tensors.columns[name]) for name in (*_SUMMED, PER_BIN[0]))
        _require(self._elements < MOST_ELEMENTS, "counts more elements than an int64 can, with the windows before it")
        used = np.flatnonzero(tensors.columns["bins"])
        place, low = numbers[used], tensors.columns["min_exponent"][used].astype(np.int64)
        self._grow(int(numbers.max(initial=-1)) + 1)
        self._low[place] = np.minimum(self._low[place], low)
        self._high[place] = np.maximum(self._high[place], low + tensors.columns["bins"][used])
        spans = self._high - self._low
        _require(
            int(spans[spans > 0].sum()) <= MOST_BINS, f"needs more than {MOST_BINS:,} bins, with the windows before it"
        )

    def _grow(self, length: int) -> None:
        more = length - len(self._low)
        if more > 0:
            self._low = np.append(self._low, np.full(more, LARGEST_EXPONENT))
            self._high = np.append(self._high, np.full(more, -LARGEST_EXPONENT))
