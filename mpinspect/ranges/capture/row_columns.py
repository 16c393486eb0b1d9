"""Many rows of counts as columns, by integers alone: a flush-denormals mode, which takes subnormals for zero, changes nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mpinspect.counting import layout
from mpinspect.ranges.store.columns import Column, narrowed

IntArray = npt.NDArray[np.int64]

_MANTISSA = (1 << 52) - 1
_BIAS = 1023
_SMALLEST_SUBNORMAL = -1074
#: Of the significand 2 - 2^-11: from here on a value rounds to 2 in 11 bits.
_NEAR_TOP = 0x7FF << 41


def exponents_and_mantissas(bits: IntArray) -> tuple[IntArray, IntArray]:
    """Of finite positive float64 values, subnormals too: exponent, and the 52 bits of the significand behind the point.

    Args:
        bits: int64, the values' bits. Zero and infinity get some exponent.
    """
    is_subnormal = bits <= _MANTISSA
    if is_subnormal.any():
        # As an integer, a multiple of the smallest subnormal, it is a normal float64.
        bits = np.where(is_subnormal, bits.astype(np.float64).view(np.int64), bits)
        return (bits >> 52) - _BIAS + _SMALLEST_SUBNORMAL * is_subnormal, bits & _MANTISSA
    return (bits >> 52) - _BIAS, bits & _MANTISSA


def peak_exponents(rows: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The exponents of the rows' largest magnitudes, rounded to 11 bits; and which rows have a value.

    Args:
        rows: int64, shape (n, length of a layout).
    """
    largest = rows[:, layout.MAX_BITS]
    exponents, mantissas = exponents_and_mantissas(largest)
    near_top = mantissas >= _NEAR_TOP
    return exponents + near_top, largest > 0


def row_columns(rows: IntArray, log2_scales: IntArray) -> dict[str, Column]:
    """What ``layout.decode`` reads from each row, shifted by -log2_scale, as the columns of ``TensorColumns`` that hold it.

    Args:
        rows: int64, shape (n, length of a layout), contiguous.
        log2_scales: int64, shape (n,).

    Raises:
        ValueError: a row's extremes disagree with its counts.
    """
    low, low_mantissas = exponents_and_mantissas(rows[:, layout.MIN_BITS])
    high, high_mantissas = exponents_and_mantissas(rows[:, layout.MAX_BITS])
    has_values = rows[:, layout.MAX_BITS] > 0
    bins = np.where(has_values, high - low + 1, 0)
    if (bins < has_values).any():
        raise ValueError("a row's smallest magnitude is larger than its largest")
    return {
        "min_exponent": np.where(has_values, low - log2_scales, 0),
        "bins": bins,
        "zeros": rows[:, layout.ZEROS].copy(),
        "infs": rows[:, layout.INFS].copy(),
        "nans": rows[:, layout.NANS].copy(),
        "min_significand": _significands(low_mantissas, has_values),
        "max_significand": _significands(high_mantissas, has_values),
        **_bins(rows, low, bins),
    }


def _significands(mantissas: IntArray, has_values: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """In [1, 2); 1 where there is no value."""
    return (np.where(has_values, mantissas, 0) | _BIAS << 52).view(np.float64)


def _bins(rows: IntArray, low: IntArray, bins: IntArray) -> dict[str, Column]:
    """The rows' counters of the exponents from ``low`` on, joined."""
    length = rows.shape[1]
    lowest = (layout.NARROW if length == layout.NARROW.length else layout.WIDE).lowest_exponent
    used = np.flatnonzero(bins)
    ends = np.cumsum(bins[used])
    starts = ends - bins[used]
    first = used * length + layout.HEADER + 3 * (low[used] - lowest)
    at = np.repeat(first - 3 * starts, bins[used])
    at += 3 * np.arange(len(at))
    flat = rows.reshape(-1)
    powers, others, tops = flat[at], flat[at + 1], flat[at + 2]
    counts = powers + others + tops
    inside = np.zeros(len(rows), dtype=np.int64)
    if len(used):
        inside[used] = np.add.reduceat(counts, starts)
    ends_are_used = (counts[starts] > 0).all() and (counts[ends - 1] > 0).all()
    if not ends_are_used or (inside != rows[:, layout.HEADER :].sum(axis=1)).any():
        raise ValueError(
            "a row's smallest or largest magnitude does not lie in its first or last exponent with a count"
        )
    return {"counts": narrowed(counts), "powers_of_two": narrowed(powers), "near_top": narrowed(tops)}
