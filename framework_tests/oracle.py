"""Exponent counts by numpy.frexp, the reference for every histogram. It reads only mpinspect's results."""

from __future__ import annotations

import numpy as np

from mpinspect import ExponentHistogram


def agrees(histogram: ExponentHistogram, values: np.ndarray) -> bool:
    """Return whether every field of a histogram matches these float64 values."""
    found = (histogram.zeros, histogram.infs, histogram.nans, histogram.min_abs, histogram.max_abs)
    counters = (histogram.counts, histogram.powers_of_two, histogram.near_top)
    exponents = [
        {histogram.min_exponent + place: int(count) for place, count in enumerate(counter) if count}
        for counter in counters
    ]
    return (found, exponents) == _truth(values.reshape(-1))


def _truth(values: np.ndarray) -> tuple[tuple[float, ...], list[dict[int, int]]]:
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    mantissas, powers = np.frexp(magnitudes)
    significands, exponents = 2 * mantissas, powers - 1
    chosen = (exponents, exponents[significands == 1], exponents[significands >= 2 - 2.0**-11])
    extremes = (magnitudes.min(), magnitudes.max()) if magnitudes.size else (0.0, 0.0)
    scalars = ((values == 0).sum(), np.isinf(values).sum(), np.isnan(values).sum(), *extremes)
    return tuple(float(scalar) for scalar in scalars), [
        {int(exponent): int(count) for exponent, count in zip(*np.unique(part, return_counts=True), strict=True)}
        for part in chosen
    ]
