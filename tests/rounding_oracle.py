"""The oracle for tests of counting and formats: integer arithmetic, independent of both implementations."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.formats import FloatFormat

Array = npt.NDArray[np.float64]


def rounded(value: Fraction, format: FloatFormat) -> Fraction:
    """Round a positive value to nearest, ties to even, in a format of unlimited upper range, with Python integers only."""
    exponent = floor_log2(value)
    quantum = Fraction(2) ** max(exponent - format.mantissa_bits, format.min_subnormal_exponent)
    steps, rest = divmod(value, quantum)
    if rest * 2 > quantum or (rest * 2 == quantum and steps % 2):
        steps += 1
    return steps * quantum


def floor_log2(value: Fraction) -> int:
    """floor(log2(value)) of a positive fraction."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def fates(
    values: Array, format: FloatFormat, log2_scales: range
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count the values x * 2^k that are flushed, and those that overflow, for each k: both int64, shape (scales,).

    Args:
        values: finite and non-zero.
    """
    mantissas, exponents = np.frexp(np.abs(values))
    significands = np.ldexp(mantissas, 53).astype(np.int64)  # 53 bits: x = significand * 2^(exponent - 53)
    scaled = exponents.astype(np.int64) - 1 + np.array(log2_scales, dtype=np.int64)[:, None]
    quantum = np.maximum(scaled - format.mantissa_bits, format.min_subnormal_exponent)
    shift = np.minimum(quantum - (scaled - 52), 60)
    assert (shift > 0).all(), "every format here has fewer bits than float64"
    steps, rest = significands >> shift, significands & ((np.int64(1) << shift) - 1)
    half = np.int64(1) << (shift - 1)
    steps = steps + ((rest > half) | ((rest == half) & (steps % 2 == 1)))
    flushed = scaled < format.min_normal_exponent if format.flushes_subnormals else steps == 0
    top = format.max_exponent - format.mantissa_bits
    most = int(math.ldexp(format.max_significand, format.mantissa_bits))
    overflowed = (quantum > top) | ((quantum == top) & (steps > most))
    return flushed.sum(1), overflowed.sum(1)


def exponent_counts(values: Array) -> dict[str, object]:
    """Count float64 values exactly: per exponent (all, powers of two, near the top), zeros, infs, NaNs, extremes."""
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite[finite != 0])
    mantissas, exponents = np.frexp(magnitudes)
    where, counts = np.unique(exponents - 1, return_counts=True)

    def per_exponent(chosen: npt.NDArray[np.bool_]) -> dict[int, int]:
        return {int(e): int(n) for e, n in zip(*np.unique(exponents[chosen] - 1, return_counts=True), strict=True)}

    return {
        "counts": {int(e): int(n) for e, n in zip(where, counts, strict=True)},
        "powers_of_two": per_exponent(mantissas == 0.5),
        "near_top": per_exponent(mantissas >= 1 - 2.0**-12),
        "zeros": int((finite == 0).sum()),
        "infs": int(np.isinf(values).sum()),
        "nans": int(np.isnan(values).sum()),
        "min_abs": float(magnitudes.min()) if magnitudes.size else 0.0,
        "max_abs": float(magnitudes.max()) if magnitudes.size else 0.0,
    }
