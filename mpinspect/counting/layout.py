"""The row of integers that a counting kernel fills and the host reads, with the same layout for every implementation.

A row is int64, and its length identifies its layout: NARROW holds every exponent of float32, float16, bfloat16 and the
FP8 formats, WIDE every exponent of float64. Rows of one layout are merged by adding their counts, and taking the minimum
and maximum of the two extremes.

=========== ==========================================================================================
ZEROS       elements that are zero
INFS, NANS  infinite elements, NaNs
MIN_BITS    float64 bits of the smallest non-zero finite magnitude (infinity's without one)
MAX_BITS    float64 bits of the largest finite magnitude (0 without one)
HEADER + 3i exact powers of two of exponent i + lowest exponent
  ... + 1   other values of that exponent
  ... + 2   values whose significand is at least 2 - 2^-11
=========== ==========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.exponents import ExponentHistogram

ZEROS, INFS, NANS, MIN_BITS, MAX_BITS, HEADER = range(6)
#: The float64 bits of infinity: MIN_BITS of a row without finite non-zero values, so that taking the minimum merges rows.
NO_MINIMUM = 0x7FF << 52


@dataclass(frozen=True)
class RowLayout:
    """The range of exponents that a row has counters for, both ends included."""

    lowest_exponent: int
    highest_exponent: int

    @property
    def length(self) -> int:
        """The number of int64 values in a row."""
        return HEADER + 3 * (self.highest_exponent - self.lowest_exponent + 1)


NARROW = RowLayout(-149, 127)
WIDE = RowLayout(-1074, 1023)
_Row = TypeVar("_Row")
_BY_LENGTH = {layout.length: layout for layout in (NARROW, WIDE)}


def repeated(row: _Row, times: int) -> _Row:
    """Multiply a row's counts in place, for elements that dimensions of stride 0 repeat ``times`` times; return the row."""
    counts: Any = row
    if times != 1:
        counts[:MIN_BITS] *= times
        counts[HEADER:] *= times
    return row


def decode(row: npt.NDArray[np.int64]) -> ExponentHistogram:
    """Return the histogram that a row describes.

    Args:
        row: int64, shape (NARROW.length,) or (WIDE.length,).

    Raises:
        ValueError: the row has another length, or extremes that disagree with its counts.
    """
    layout = _BY_LENGTH.get(len(row))
    if layout is None:
        raise ValueError(f"a row of counts has {sorted(_BY_LENGTH)} values, not {len(row)}")
    bins = row[HEADER:].reshape(-1, 3)
    counts = bins.sum(axis=1)
    zeros, infs, nans = (int(value) for value in row[:MIN_BITS])
    used = np.flatnonzero(counts)
    if not used.size:
        return ExponentHistogram.from_counts([], 0, zeros=zeros, infs=infs, nans=nans)
    low, high = int(used[0]), int(used[-1])
    histogram = ExponentHistogram.from_counts(
        counts[low : high + 1],
        layout.lowest_exponent + low,
        powers_of_two=bins[low : high + 1, 0],
        near_top=bins[low : high + 1, 2],
        zeros=zeros,
        infs=infs,
        nans=nans,
    )
    smallest, largest = _decompose(int(row[MIN_BITS])), _decompose(int(row[MAX_BITS]))
    if (smallest[0], largest[0]) != (histogram.min_exponent, histogram.max_exponent):
        raise ValueError(
            "a row's smallest or largest magnitude does not lie in its first or last exponent with a count"
        )
    return replace(histogram, min_significand=smallest[1], max_significand=largest[1])


def _decompose(bits: int) -> tuple[int, float]:
    """Return exponent and significand of float64 bits, by integer arithmetic, so that subnormals are never flushed."""
    field, mantissa = bits >> 52, bits & ((1 << 52) - 1)
    if field:
        return field - 1023, 1 + mantissa * 2.0**-52
    exponent = mantissa.bit_length() - 1 - 1074
    return exponent, mantissa * 2.0 ** -(mantissa.bit_length() - 1)
