"""ExponentHistogram: integer counts of binary exponents, from which all range figures are computed.

The exponent of x is floor(log2|x|). Each exponent has a count and two edge counters: the exact
powers of two (which decide ties at the flush edge) and the values whose significand is at least
2 - 2^-11 (which decide FP16's overflow edge). Multiplying a tensor by 2^k only shifts the counts, so one
histogram serves every power-of-two loss scale; histograms of several tensors can be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.formats import FloatFormat, FormatLike, as_format

IntArray = npt.NDArray[np.int64]

#: Significands from this value up round to 2 in 11 bits (FP16, TF32); ``near_top`` counts them.
NEAR_TOP_SIGNIFICAND = 2.0 - 2.0**-11

#: E[significand] and E[significand^2] of significands uniform in [1, 2), for estimates.
MEAN_SIGNIFICAND = 1.5
MEAN_SQUARE_SIGNIFICAND = 7.0 / 3.0


class UndecidableCountError(ValueError):
    """The counts only bound the number of overflowed elements; ``overflowed_bounds`` returns the bounds."""


@dataclass(frozen=True)
class Interval:
    """An estimate with bounds that certainly contain the true value."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Exact integer counts of the exponents of a tensor's elements.

    The arrays run from ``min_exponent`` upwards and are trimmed: the first and the last count are not zero.
    An empty histogram (no finite non-zero value) has arrays of length 0 and ``min_exponent`` 0.

    Args:
        counts: int64, finite non-zero values per exponent.
        powers_of_two: int64, exact powers of two among the counts, per exponent.
        near_top: int64, values with significand >= 2 - 2^-11 among the counts, per exponent.
        min_exponent: exponent of the first count.
        zeros, infs, nans: elements that have no exponent.
        min_significand, max_significand: significands, in [1, 2), of the smallest and the largest finite
            non-zero magnitude (1.0 without such a value).

    A method's ``format`` may be a FloatFormat, a name such as "fp16", or a dtype; for any other, the method raises
    ValueError with a list of the known formats.
    """

    counts: IntArray
    powers_of_two: IntArray
    near_top: IntArray
    min_exponent: int
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    min_significand: float = 1.0
    max_significand: float = 1.0

    @classmethod
    def empty(cls) -> ExponentHistogram:
        """Return the histogram of no elements: the neutral element of ``+``."""
        return cls(_NONE, _NONE, _NONE, 0)

    @classmethod
    def from_counts(
        cls,
        counts: npt.ArrayLike,
        min_exponent: int,
        *,
        powers_of_two: npt.ArrayLike | None = None,
        near_top: npt.ArrayLike | None = None,
        zeros: int = 0,
        infs: int = 0,
        nans: int = 0,
        min_abs: float | None = None,
        max_abs: float | None = None,
    ) -> ExponentHistogram:
        """Build a histogram from plain arrays of equal length; trim them and check that they are consistent.

        ``min_abs`` / ``max_abs`` (of the finite non-zero values) default to their lower bounds from the counts.

        Raises:
            ValueError: the arrays differ in length, a count is negative, an edge counter exceeds its count,
                or an extreme does not lie in the lowest / highest exponent.
        """
        bins = np.asarray(counts, dtype=np.int64)
        powers, tops = (
            np.zeros_like(bins) if edges is None else np.asarray(edges, dtype=np.int64)
            for edges in (powers_of_two, near_top)
        )
        if bins.ndim != 1 or powers.shape != bins.shape or tops.shape != bins.shape:
            raise ValueError("counts, powers_of_two and near_top must be one-dimensional and of one length")
        if (bins < 0).any() or (powers < 0).any() or (tops < 0).any() or min(zeros, infs, nans) < 0:
            raise ValueError("a count is negative")
        if (powers + tops > bins).any():
            raise ValueError("an edge counter is larger than the count of its exponent")
        used = np.flatnonzero(bins)
        if not used.size:
            return cls(_NONE, _NONE, _NONE, 0, zeros, infs, nans)
        first, last = int(used[0]), int(used[-1])
        low, high = min_exponent + first, min_exponent + last
        # Unknown extremes become the lowest values that their bins allow.
        min_significand = max_significand = 1.0
        if min_abs is not None:
            min_significand = _significand(min_abs, low, "min_abs")
        if max_abs is not None:
            max_significand = _significand(max_abs, high, "max_abs")
        elif tops[last]:
            max_significand = NEAR_TOP_SIGNIFICAND
        bins, powers, tops = (array[first : last + 1] for array in (bins, powers, tops))
        return cls(bins, powers, tops, low, zeros, infs, nans, min_significand, max_significand)

    # -- contents -----------------------------------------------------------------------------------------

    @property
    def nonzero(self) -> int:
        """The number of finite non-zero elements."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """The number of all elements, including zeros, infs and NaNs."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def nonfinite(self) -> int:
        """The number of infs and NaNs."""
        return self.infs + self.nans

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite magnitude. Raises ValueError if there is no finite non-zero value."""
        self._require_values()
        return self.min_exponent + len(self.counts) - 1

    @property
    def max_abs(self) -> float:
        """Largest finite magnitude, exact; 0.0 without values, inf if a shift took it beyond float64's range."""
        return _ldexp(self.max_significand, self.max_exponent) if len(self.counts) else 0.0

    @property
    def min_abs(self) -> float:
        """Smallest non-zero finite magnitude, exact; 0.0 without values."""
        return _ldexp(self.min_significand, self.min_exponent) if len(self.counts) else 0.0

    @property
    def peak_exponent(self) -> int:
        """Exponent of the largest magnitude after rounding to 11 significant bits, which decides overflow in FP16."""
        return self.max_exponent + int(self.near_top[-1] > 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return self._scalars() == other._scalars() and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self._arrays(), other._arrays(), strict=True)
        )

    def __hash__(self) -> int:
        return hash((self._scalars(), self.counts.tobytes()))

    def __repr__(self) -> str:
        span = "no finite non-zero value"
        if len(self.counts):
            span = f"2^{self.min_exponent}..2^{self.max_exponent}"
        return (
            f"ExponentHistogram({self.total} elements, {span}, zeros={self.zeros}, infs={self.infs}, nans={self.nans})"
        )

    # -- arithmetic ---------------------------------------------------------------------------------------

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """Return the exact histogram of both tensors together."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return merge((self, other))

    def __radd__(self, other: object) -> ExponentHistogram:
        return self if other == 0 else NotImplemented

    def shifted(self, log2_scale: int) -> ExponentHistogram:
        """Return the histogram of x * 2^log2_scale in exact arithmetic, without any format's edges."""
        return ExponentHistogram(
            *self._arrays(),
            self.min_exponent + log2_scale if len(self.counts) else 0,
            self.zeros,
            self.infs,
            self.nans,
            self.min_significand,
            self.max_significand,
        )

    # -- effects of a format --------------------------------------------------------------------------------

    def flushed(self, format: FormatLike, log2_scale: int = 0) -> int:
        """Return how many non-zero elements of x * 2^log2_scale the format rounds to zero. Exact, ties included."""
        format = as_format(format)
        edge = format.flush_exponent - log2_scale
        below = self._count_below(edge)
        if format.flushes_subnormals:
            return below
        return below + self._at(self.powers_of_two, edge)

    def subnormal(self, format: FormatLike, log2_scale: int = 0) -> int:
        """Return how many elements lie below the smallest normal before rounding but are not flushed. Exact."""
        format = as_format(format)
        return self._count_below(format.min_normal_exponent - log2_scale) - self.flushed(format, log2_scale)

    def overflowed_bounds(self, format: FormatLike, log2_scale: int = 0) -> tuple[int, int]:
        """Return the least and largest possible number of finite elements of x * 2^log2_scale that overflow.

        Both are always equal for FP16 and TF32. For other formats, the counts may not decide how many values of the
        format's top exponent overflow; the extremes decide only whether any and whether all of them do. Infinities of
        the input are not counted: see ``infs``.
        """
        format = as_format(format)
        edge_exponent = format.max_exponent - log2_scale
        certain = self.nonzero - self._count_below(edge_exponent + 1)
        in_bin = self._at(self.counts, edge_exponent)
        if not in_bin:
            return certain, certain
        low, high = self._bounds_in_edge_bin(format, edge_exponent)
        return certain + low, certain + high

    def overflowed(self, format: FormatLike, log2_scale: int = 0) -> int:
        """Return the exact number of finite elements that overflow; for FP16 and TF32 the counts always suffice.

        Raises:
            UndecidableCountError: the counts only bound the answer; use ``overflowed_bounds``.
        """
        format = as_format(format)
        low, high = self.overflowed_bounds(format, log2_scale)
        if low != high:
            raise UndecidableCountError(
                f"between {low} and {high} elements overflow {format.name}: exponent counts do not show how many of "
                f"those in its highest power of two lie beyond {format.overflow_edge:g}; use overflowed_bounds()"
            )
        return low

    def flushed_fraction(self, format: FormatLike, log2_scale: int = 0) -> float:
        """Return flushed elements divided by finite non-zero elements, 0..1 (0.0 without such elements)."""
        return self._fraction(self.flushed(format, log2_scale))

    def subnormal_fraction(self, format: FormatLike, log2_scale: int = 0) -> float:
        """Return subnormal elements divided by finite non-zero elements, 0..1 (0.0 without such elements)."""
        return self._fraction(self.subnormal(format, log2_scale))

    def overflowed_fraction(self, format: FormatLike, log2_scale: int = 0) -> float:
        """Return overflowed elements divided by finite non-zero elements, 0..1. Raises the errors of ``overflowed``."""
        return self._fraction(self.overflowed(format, log2_scale))

    def range_offset(self, format: FormatLike) -> int | None:
        """Return the number of unused powers of two at the format's top: the format's max_exponent - max_exponent.

        Negative if elements lie beyond the format; None if there is no finite non-zero value.
        """
        format = as_format(format)
        if not len(self.counts):
            return None
        return format.max_exponent - self.max_exponent

    def max_log2_scale(self, format: FormatLike) -> int | None:
        """Return the largest k such that every finite element of x * 2^k stays in range; exact.

        Returns None if there is no finite non-zero value.
        """
        format = as_format(format)
        if not len(self.counts):
            return None
        return format.max_exponent - self.max_exponent - int(_beyond(self.max_significand, format))

    # -- sums -------------------------------------------------------------------------------------------------

    def sum_abs(self) -> Interval:
        """Return the sum of ``|x|`` over the finite elements: bounds by the counts, estimate for uniform significands.

        Terms are added in float64; a sum beyond float64's range is inf.
        """
        return self._sum_over(self.counts, self.powers_of_two, self.near_top, self.min_exponent, power=1)

    def sum_squares(self) -> Interval:
        """Return the sum of x^2 over the finite elements, with bounds and estimate as for ``sum_abs``."""
        return self._sum_over(self.counts, self.powers_of_two, self.near_top, self.min_exponent, power=2)

    def lost_l1_share(self, format: FormatLike, log2_scale: int = 0) -> Interval:
        """Return the flushed share of the L1 norm (sum of ``|x|``), 0..1.

        The share is an estimate with bounds, since an exponent gives ``|x|`` only within a factor of 2.
        """
        format = as_format(format)
        if format.flush_exponent - log2_scale < self.min_exponent:
            return Interval(0.0, 0.0, 0.0)
        counts, powers, tops = self._flushed_part(format, log2_scale)
        # Exponents are relative to the largest, so that neither huge nor tiny values leave float64's range.
        base = 1 - len(self.counts)
        lost = self._sum_over(counts, powers, tops, base, power=1)
        kept = self._sum_over(self.counts - counts, self.powers_of_two - powers, self.near_top - tops, base, power=1)
        return Interval(_share(lost.estimate, kept.estimate), _share(lost.low, kept.high), _share(lost.high, kept.low))

    def noise_to_signal(self, format: FormatLike, log2_scale: int = 0) -> float:
        """Estimate the noise-to-signal ratio, sum(error^2) / sum(x^2), of rounding x * 2^log2_scale to the format.

        A value that survives at scaled exponent e' has error variance
        4^(max(e', min_normal_exponent) - mantissa_bits) / 12 (rounding error uniform over one step); a flushed
        value's squared error is the value's square. Returns inf if any element certainly overflows.
        """
        format = as_format(format)
        if not len(self.counts):
            return 0.0
        if self.overflowed_bounds(format, log2_scale)[0]:
            return math.inf
        top = self.max_exponent
        relative = np.arange(self.min_exponent - top, 1, dtype=np.float64)
        scaled = relative + top + log2_scale
        flushed_counts, flushed_powers, flushed_tops = self._flushed_part(format, log2_scale)
        step = np.maximum(scaled, format.min_normal_exponent) - format.mantissa_bits - log2_scale - top
        kept = (self.counts - flushed_counts).astype(np.float64)
        # A bin without surviving values has no rounding error, and its step may lie beyond float64's range.
        step[kept == 0] = -math.inf
        rounding = float((kept * np.exp2(2 * step) / 12).sum())
        lost = self._sum_over(flushed_counts, flushed_powers, flushed_tops, self.min_exponent - top, power=2)
        signal = self._sum_over(*self._arrays(), self.min_exponent - top, power=2)
        return (rounding + lost.estimate) / signal.estimate

    # -- inside -----------------------------------------------------------------------------------------------

    def _arrays(self) -> tuple[IntArray, IntArray, IntArray]:
        return self.counts, self.powers_of_two, self.near_top

    def _scalars(self) -> tuple[float, ...]:
        return self.min_exponent, self.zeros, self.infs, self.nans, self.min_significand, self.max_significand

    def _require_values(self) -> None:
        if not len(self.counts):
            raise ValueError("the histogram holds no finite non-zero value, so it has no exponent")

    def _fraction(self, count: int) -> float:
        return ratio(count, self.nonzero)

    def _count_below(self, exponent: int) -> int:
        """Return the number of finite non-zero elements with a smaller exponent."""
        return int(self.counts[: min(max(exponent - self.min_exponent, 0), len(self.counts))].sum())

    def _at(self, array: IntArray, exponent: int) -> int:
        index = exponent - self.min_exponent
        if not 0 <= index < len(array):
            return 0
        return int(array[index])

    def _flushed_part(self, format: FloatFormat, log2_scale: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return copies of the three arrays that count only the flushed elements."""
        index = format.flush_exponent - log2_scale - self.min_exponent
        below = min(max(index, 0), len(self.counts))
        counts, powers, tops = (array.copy() for array in self._arrays())
        for part in (counts, powers, tops):
            part[below:] = 0
        if not format.flushes_subnormals and 0 <= index < len(counts):
            counts[index] = powers[index] = self.powers_of_two[index]
        return counts, powers, tops

    def _bounds_in_edge_bin(self, format: FloatFormat, exponent: int) -> tuple[int, int]:
        """Return bounds on the number of elements of one exponent with a significand beyond the overflow edge."""
        count, powers, tops = (self._at(array, exponent) for array in self._arrays())
        edge = format.overflow_significand
        if edge == NEAR_TOP_SIGNIFICAND and format.overflow_edge_overflows:
            return tops, tops
        low, high = (tops, count - powers) if edge < NEAR_TOP_SIGNIFICAND else (0, tops)
        if exponent == self.max_exponent:
            if not _beyond(self.max_significand, format):
                return 0, 0
            low = max(low, 1)
        if exponent == self.min_exponent:
            if _beyond(self.min_significand, format):
                return count, count
            high = min(high, count - 1)
        return low, high

    @staticmethod
    def _sum_over(counts: IntArray, powers: IntArray, tops: IntArray, min_exponent: int, *, power: int) -> Interval:
        if not len(counts):
            return Interval(0.0, 0.0, 0.0)
        weight = _weights(min_exponent, len(counts), power)
        other = counts - powers - tops
        mean = MEAN_SIGNIFICAND if power == 1 else MEAN_SQUARE_SIGNIFICAND
        exact, plain, near = _weighed(weight, powers), _weighed(weight, other), _weighed(weight, tops)
        low = exact + plain + near * NEAR_TOP_SIGNIFICAND**power
        high = exact + (plain + near) * 2.0**power
        estimate = exact + plain * mean + near * 2.0**power
        return Interval(estimate, low, high)


def merge(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """Return the sum of any number of histograms: counts added, extremes merged. Exact and independent of order."""
    parts = list(histograms)
    used = [part for part in parts if len(part.counts)]
    zeros, infs, nans = (sum(getattr(part, name) for part in parts) for name in ("zeros", "infs", "nans"))
    if not used:
        return ExponentHistogram(_NONE, _NONE, _NONE, 0, zeros, infs, nans)
    low = min(part.min_exponent for part in used)
    high = max(part.max_exponent for part in used)
    arrays = np.zeros((3, high - low + 1), dtype=np.int64)
    for part in used:
        start = part.min_exponent - low
        for row, array in zip(arrays, part._arrays(), strict=True):
            row[start : start + len(array)] += array
    return ExponentHistogram(
        arrays[0],
        arrays[1],
        arrays[2],
        low,
        zeros,
        infs,
        nans,
        min(part.min_significand for part in used if part.min_exponent == low),
        max(part.max_significand for part in used if part.max_exponent == high),
    )


_NONE: IntArray = np.zeros(0, dtype=np.int64)


@lru_cache(maxsize=256)
def _weights(min_exponent: int, bins: int, power: int) -> npt.NDArray[np.float64]:
    """Return 2^(power * exponent) of each bin; inf beyond float64's range.

    The result is cached, since the tensors of a model have few different ranges.
    """
    with np.errstate(over="ignore", under="ignore"):
        weight: npt.NDArray[np.float64] = np.exp2(power * (min_exponent + np.arange(bins, dtype=np.float64)))
    weight.setflags(write=False)
    return weight


def _weighed(weight: npt.NDArray[np.float64], counts: IntArray) -> float:
    """Return the sum of weight * counts; bins without a count are left out, since inf * 0 would be NaN."""
    # The last weight is the largest. If it is below 2^900, the sum stays in float64's range even for 2^63 elements.
    if weight[-1] < 2.0**900:
        return float(np.add.reduce(weight * counts))
    with np.errstate(over="ignore"):
        return float(np.multiply(weight, counts, out=np.zeros(len(counts)), where=counts > 0).sum())


def _significand(value: float, exponent: int, what: str) -> float:
    mantissa, power = math.frexp(value)
    if not math.isfinite(value) or value <= 0 or power - 1 != exponent:
        raise ValueError(f"{what}={value!r} does not lie in [2^{exponent}, 2^{exponent + 1}), where the counts put it")
    return mantissa * 2


def _ldexp(significand: float, exponent: int) -> float:
    try:
        return math.ldexp(significand, exponent)
    except OverflowError:
        return math.inf


def _beyond(significand: float, format: FloatFormat) -> bool:
    """Return whether a value of the format's top exponent with this significand overflows."""
    edge = format.overflow_significand
    return Fraction(significand) > Fraction(edge) or (significand == edge and format.overflow_edge_overflows)


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0.0 if the whole is zero."""
    return part / whole if whole else 0.0


def _share(part: float, rest: float) -> float:
    return ratio(part, part + rest)
