"""What the columns of a window may hold: counts that can be of one run, so that what follows reckons with them unasked."""

from __future__ import annotations

import numpy as np

from mpinspect.ranges.session import LARGEST_EXPONENT
from mpinspect.ranges.store.columns import PER_BIN, SIGNIFICANDS, Column, TensorColumns
from mpinspect.runtime.decoding import DecodingError

#: Bytes that a window may unpack to: a kilobyte, three times what 40 exponents take, for each of the most tensors.
LARGEST_WINDOW = 256 << 20
#: Bytes that the windows of one file may unpack to: as much as 65,536 tensors in 32 windows take, 40 exponents each.
LARGEST_WINDOWS = 1 << 30
#: Bins of all tensors over the whole run, which analysis holds as three int64 each: 128 exponents of 262,144 tensors.
MOST_BINS = 1 << 25
#: Tensors of a run.
MOST_TENSORS = 1 << 18
#: Elements of all bins of a file together, so that sums of int64 hold.
MOST_ELEMENTS = 2.0**62
#: The largest float64 below 2.
_LARGEST_SIGNIFICAND = 2.0 - 2.0**-52
_SUMMED = ("samples", "zeros", "infs", "nans", "peak_counts")


def check_counts(tensors: TensorColumns) -> None:
    """Raises DecodingError where a column holds what no tensor can have. Knows that the columns fit together."""
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
    """Return whether every number is in there; a NaN is not."""
    return not column.size or bool(low <= column.min() and column.max() <= high)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DecodingError(otherwise)


def _sum(column: Column) -> float:
    """Of numbers that are not negative. An int64 holds that of all that fit into memory, but for int64 themselves."""
    return float(column.sum(dtype=np.float64 if column.itemsize == 8 else np.int64))


class Limits:
    """What the windows of one file have taken so far, in memory and in number."""

    def __init__(self) -> None:
        self._bytes_left = LARGEST_WINDOWS
        self._elements = 0.0
        #: Lowest and one past the highest exponent by the tensor's number. Merged windows have every bin between them.
        self._low, self._high = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    @property
    def largest(self) -> int:
        """Bytes that the next window may unpack to."""
        return min(LARGEST_WINDOW, self._bytes_left)

    def take(self, numbers: Column, tensors: TensorColumns, bytes_taken: int) -> None:
        """Raises DecodingError where the windows so far, with this one, are more than a run has.

        Args:
            numbers: the tensors' numbers, which outlast a window.
            tensors: checked by ``check_counts``.
            bytes_taken: that the window's payload unpacked to.
        """
        self._bytes_left -= bytes_taken
        self._elements += sum(_sum(tensors.columns[name]) for name in (*_SUMMED, PER_BIN[0]))
        _require(self._elements < MOST_ELEMENTS, "counts more elements than an int64 can, with the windows before it")
        used = np.flatnonzero(tensors.columns["bins"])
        place, low = numbers[used], tensors.columns["min_exponent"][used].astype(np.int64)
        self._grow(int(numbers.max()) + 1 if len(numbers) else 0)
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
