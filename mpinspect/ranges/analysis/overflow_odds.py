"""Derives the largest safe loss scale, and its confidence, from the largest gradients of the sampled steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from mpinspect.numeric.exponents import NEAR_TOP_SIGNIFICAND
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.evidence import forward_broke
from mpinspect.ranges.session import Event
from mpinspect.ranges.windows.tensors import add_counts

#: Confidence level of the bounds.
CONFIDENCE = 0.95
#: Zero events in n trials: the rate is at most 3/n with 95% confidence, for ln(1 - 0.95) = -2.996 ("rule of three").
RULE_OF_THREE = 3.0
#: The normal distribution's 95% quantile.
_Z95 = 1.6449
#: Number of events above which a normal approximation replaces the exact sum of binomial terms.
_EXACT = 10_000
#: Least standard deviation of peaks known to their power of two: sqrt(1/12), as of a uniform value within one octave.
_LEAST_SPREAD = 1 / math.sqrt(12)
#: Minimum number of steps for a standard deviation: with fewer, the tolerance factor k exceeds 8.
FEWEST_IN_BLOCK = 5
#: A NaN is attributed to an overflow only if the tensor's earlier magnitudes reached 1/16 of FP16's maximum.
NEAR_OVERFLOW = 65504 / 16


def log2_room(peak_exponent: int, format: FloatFormat) -> int:
    """Return the largest k such that a value of this peak exponent (rounded to 11 bits) does not overflow.

    For FP16 the result is exactly 15 - peak. Formats with fewer bits overflow earlier within their highest power of
    two, so the result is one less for them, to be safe.
    """
    return format.max_exponent - peak_exponent - int(format.overflow_significand < NEAR_TOP_SIGNIFICAND)


@dataclass(frozen=True)
class Ceiling:
    """The largest loss scale without overflow, as a power of two.

    Args:
        log2_highest: largest k with an overflow probability of at most 1/growth_interval per step.
        margin: powers of two already subtracted as a reserve for gradients larger than any seen.
        log2_overflowed: smallest k with an overflow in the run itself; None without an overflow.
        log2_of_finite: largest k without overflow in the steps that did not overflow in the run; None if there are none, or if
            unknown.
        lacking: missing powers of two of reserve, compared with the reserve that the spread of the peaks requires.
    """

    log2_highest: int
    margin: int = 0
    log2_overflowed: int | None = None
    log2_of_finite: int | None = None
    lacking: int = 0

    def reaching(self, log2_scale: int) -> Ceiling:
        """Return this ceiling raised to 2^log2_scale at the cost of its reserve, unless anything overflowed there."""
        given_up = log2_scale - self.log2_highest
        has_overflowed = self.log2_overflowed is not None and log2_scale >= self.log2_overflowed
        if has_overflowed or not 0 < given_up <= self.margin:
            return self
        return replace(self, log2_highest=log2_scale, margin=self.margin - given_up, lacking=self.lacking + given_up)

    def below(self, log2_overflowed: int | None) -> Ceiling:
        """Return this ceiling lowered below 2^log2_overflowed, the smallest scale that overflowed in the run (None: no one)."""
        if log2_overflowed is None:
            return self
        if log2_overflowed > self.log2_highest:
            return replace(self, log2_overflowed=log2_overflowed)
        return Ceiling(log2_overflowed - 1, 0, log2_overflowed, self.log2_of_finite)


def log2_highest(
    blocks: Sequence[Mapping[int, int]],
    format: FloatFormat,
    growth_interval: int,
    exact: Sequence[Mapping[int, int]] | None = None,
) -> Ceiling | None:
    """Return the largest scale with an overflow probability of at most 1/growth_interval per step; None if there are no steps.

    Args:
        blocks: one mapping per block of consecutive steps: exponent of a step's largest gradient (rounded to 11 bits)
            -> number of steps. Separate blocks prevent a drift over the run from counting as spread.
        growth_interval: number of steps after which a dynamic scaler doubles its scale, risking about one overflow each
            time.
        exact: ``blocks`` without the steps that overflowed, whose peaks are only lower bounds and carry no spread.

    The (1 - 1/growth_interval) quantile of the peaks is bounded from above with 95% confidence. If there are enough
    steps (3 growth intervals) the bound is an order statistic, which assumes no distribution; otherwise it is
    ``normal_bound`` or the largest peak, whichever is larger. The margin never excludes scale 1 if no step seen overflows at
    scale 1; ``Ceiling.lacking`` is the part omitted for this.
    """
    peaks = add_counts(blocks)
    steps = sum(peaks.values())
    if not steps:
        return None
    probability = 1 / growth_interval
    exceedances = tolerated_overflows(steps, probability)
    for exponent in sorted(peaks, reverse=True):
        if peaks[exponent] > exceedances:
            break
        exceedances -= peaks[exponent]
    seen = log2_room(exponent, format)
    if exact is None:
        exact = blocks
    of_finite = min((log2_room(peak, format) for block in exact for peak in block), default=None)
    if steps * probability >= RULE_OF_THREE:
        return Ceiling(seen, log2_of_finite=of_finite)
    bound = normal_bound(exact, probability)
    if bound is not None:
        # A peak of exponent e lies in [2^e, 2^(e+1)), on average at e + 1/2; adding 1/2 and rounding down gives the bound's.
        exponent = max(exponent, math.floor(bound + 0.5))
    highest = log2_room(exponent, format)
    return Ceiling(highest, seen - highest, log2_of_finite=of_finite).reaching(0)


def normal_bound(blocks: Sequence[Mapping[int, int]], probability: float) -> float | None:
    """Return a 95% upper bound of the (1 - probability) quantile of the peaks' exponents, taken as normally distributed.

    The bound is the maximum of mean + k s over the blocks, with the pooled within-block standard deviation s (at least
    _LEAST_SPREAD) and k from ``tolerance_factor``; None if there are too few steps.
    """
    blocks = _large_enough(blocks)
    sizes = [sum(block.values()) for block in blocks]
    if not sizes or min(sizes) < FEWEST_IN_BLOCK:
        return None
    means = [sum(e * count for e, count in block.items()) / n for block, n in zip(blocks, sizes, strict=True)]
    squares = sum(
        count * (e - mean) ** 2 for block, mean in zip(blocks, means, strict=True) for e, count in block.items()
    )
    freedom = sum(sizes) - len(sizes)
    spread = max(math.sqrt(squares / freedom), _LEAST_SPREAD)
    return max(mean + tolerance_factor(n, freedom, probability) * spread for mean, n in zip(means, sizes, strict=True))


def _large_enough(blocks: Sequence[Mapping[int, int]]) -> list[Mapping[int, int]]:
    """Return the blocks, merging neighbours until each has FEWEST_IN_BLOCK steps or only one block is left."""
    merged: list[Mapping[int, int]] = []
    for block in blocks:
        if merged and min(sum(merged[-1].values()), sum(block.values())) < FEWEST_IN_BLOCK:
            merged[-1] = add_counts((merged[-1], block))
        else:
            merged.append(block)
    return merged


def tolerance_factor(n: int, freedom: float, probability: float) -> float:
    """Return the k such that mean + k s of n normal values exceeds their (1 - probability) quantile with 95% confidence.

    This is the one-sided tolerance limit of the NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.6.3 (after Natrella,
    1963): k = (z + sqrt(z^2 - a b)) / a, a = 1 - c^2 / (2 f), b = z^2 - c^2 / n, where z and c are the normal quantiles of 1 -
    probability and of the confidence, and f is the number of degrees of freedom of s.
    """
    covered, confidence = NormalDist().inv_cdf(1 - probability), NormalDist().inv_cdf(CONFIDENCE)
    a = 1 - confidence**2 / (2 * freedom)
    b = covered**2 - confidence**2 / n
    return (covered + math.sqrt(max(covered**2 - a * b, 0.0))) / a


def overflowed_at(events: Iterable[Event]) -> int | None:
    """Return the smallest k such that the run overflowed at 2^k (k is rounded up); None if the run did not overflow.

    An infinity in the backward after a finite forward counts as an overflow. A NaN counts only if the same tensor's
    values were near FP16's maximum (NEAR_OVERFLOW): other NaNs arise in the arithmetic, at any scale.
    """
    powers = (
        math.ceil(math.log2(event.loss_scale))
        for event in events
        if event.loss_scale
        and 0 < event.loss_scale < math.inf
        and not forward_broke(event)
        and (event.value == "inf" or max(event.last_maxima, default=0.0) >= NEAR_OVERFLOW)
    )
    return min(powers, default=None)


def tolerated_overflows(steps: int, probability: float) -> int:
    """Return how many of the largest peaks can be skipped with the next one still a 95% upper bound of the quantile.

    The (m+1)-th largest of n values is at least the (1 - p) quantile unless at most m values exceed the quantile. The
    result is therefore the largest m with BinomialCDF(m; n, p) <= 0.05, or 0. If n p exceeds 10,000 the normal
    approximation is used, less one: the skewness that it neglects amounts to (z^2 - 1) / 6 = 0.3.
    """
    mean = steps * probability
    if mean > _EXACT:
        return math.floor(mean - _Z95 * math.sqrt(mean * (1 - probability)) - 1)
    passed_over = -1
    for m, cumulative in enumerate(_binomial_cdf(steps, probability)):
        if cumulative > 1 - CONFIDENCE:
            break
        passed_over = m
    return max(passed_over, 0)


def overflow_probability_bound(overflows: int, steps: int) -> float | None:
    """Return a 95% upper bound of a step's overflow probability after ``overflows`` in ``steps`` steps; None without steps.

    Without overflows the bound is 3/n. Otherwise it is the p with BinomialCDF(overflows; n, p) = 0.05 (Clopper and
    Pearson), found by bisection, or Wilson's score bound for more than 10,000 overflows. Steps are treated as
    independent.
    """
    if not steps:
        return None
    if not overflows:
        return min(1.0, RULE_OF_THREE / steps)
    if overflows > _EXACT:
        spread = math.sqrt(overflows * (steps - overflows) / steps + _Z95**2 / 4)
        return min(1.0, (overflows + _Z95**2 / 2 + _Z95 * spread) / (steps + _Z95**2))
    low, high = overflows / steps, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _binomial_cdf(steps, middle, overflows)[-1] > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _binomial_cdf(n: int, p: float, last: int | None = None) -> list[float]:
    """Return P(X <= m) for m = 0..last, X binomial(n, p); by default up to the first value above 1 - CONFIDENCE."""
    if p >= 1:
        return [0.0] * n + [1.0]
    values: list[float] = []
    total, log_term = 0.0, n * math.log1p(-p)
    for m in range(n + 1):
        total += math.exp(log_term)
        values.append(min(total, 1.0))
        if m in (n, last) or (last is None and total > 1 - CONFIDENCE):
            break
        log_term += math.log((n - m) / (m + 1)) + math.log(p) - math.log1p(-p)
    return values
