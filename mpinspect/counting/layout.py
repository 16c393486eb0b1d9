"""The row of integers that a counting kernel fills and the host reads: one layout for every way of counting.

A row is int64. Its length tells the layout: NARROW holds every exponent that float32, float16, bfloat16 and the
FP8 formats have, WIDE those of float64. Rows of one tensor can be summed except for the two extremes.

=========== ==========================================================================================
ZEROS       elements that are zero
INFS, NANS  infinite elements, NaNs
MIN_BITS    float64 bits of the smallest non-zero finite magnitude (meaningless when there is none)
MAX_BITS    float64 bits of the largest finite magnitude
HEADER + 3i exact powers of two of exponent i + lowest exponent
  ... + 1   other values of that exponent
  ... + 2   values whose significand is at least 2 - 2^-11
=========== ==========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpinspect.exponents import ExponentHistogram

ZEROS, INFS, NANS, MIN_BITS, MAX_BITS, HEADER = range(6)


@dataclass(frozen=True)
class RowLayout:
    """Which exponents a row has counters for, both ends included."""

    lowest_exponent: int
    highest_exponent: int

    @property
    def length(self) -> int:
        """int64 values in a row."""
        return HEADER + 3 * (self.highest_exponent - self.lowest_exponent + 1)


NARROW = RowLayout(-149, 127)
WIDE = RowLayout(-1074, 1023)
_BY_LENGTH = {layout.length: layout for layout in (NARROW, WIDE)}


def decode(row: npt.NDArray[np.int64]) -> ExponentHistogram:
    """The histogram that a row describes.

    Args:
        row: int64, shape (NARROW.length,) or (WIDE.length,).

    Raises:
        ValueError: another length.
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
    min_abs, max_abs = row[MIN_BITS : MAX_BITS + 1].view(np.float64)
    return ExponentHistogram.from_counts(
        counts[low : high + 1],
        layout.lowest_exponent + low,
        powers_of_two=bins[low : high + 1, 0],
        near_top=bins[low : high + 1, 2],
        zeros=zeros,
        infs=infs,
        nans=nans,
        min_abs=float(min_abs),
        max_abs=float(max_abs),
    )
