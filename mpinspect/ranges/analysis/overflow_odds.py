"""From the largest gradients of the sampled steps to the largest scale that is safe, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from mpinspect.numeric.exponents import NEAR_TOP_SIGNIFICAND
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.evidence import forward_broke
from mpinspect.ranges.session import Event, add_counts

#: How sure the bounds are.
CONFIDENCE = 0.95
#: Zero events in n trials: the rate is at most 3/n with 95% confidence, for ln(1 - 0.95) = -2.996 ("rule of three").
RULE_OF_THREE = 3.0
#: The normal distribution's 95% quantile.
_Z95 = 1.6449
#: Events from which the normal distribution stands for the binomial, whose terms would be added one by one.
_EXACT = 10_000
#: Steps from which a spread is taken: with fewer the factor k alone is beyond 8.
FEWEST_IN_BLOCK = 5
#: A NaN may stem from an overflow on its way where magnitudes had come within 16 times of FP16's top.
NEAR_OVERFLOW = 65504 / 16


def log2_room(peak_exponent: int, format: FloatFormat) -> int:
    """Largest k for which a value of this peak exponent (11 bits) does not overflow: 15 - peak for FP16, exactly.

    Formats of fewer bits overflow earlier in their highest power of two; there one k less, to be sure.
    """
    return format.max_exponent - peak_exponent - int(format.overflow_significand < NEAR_TOP_SIGNIFICAND)


@dataclass(frozen=True)
class Ceiling:
    """The largest scale without overflow, as powers of two.

    Args:
        log2_highest: largest k at which a step overflows with a probability of at most 1/growth_interval.
        margin: powers of two of it that are kept for steps larger than any that was seen.
        log2_overflowed: least k at which the run itself overflowed; None where it did not.
    """

    log2_highest: int
    margin: int = 0
    log2_overflowed: int | None = None

    def below(self, log2_overflowed: int | None) -> Ceiling:
        """This ceiling for a run that overflowed at 2^log2_overflowed."""
        if log2_overflowed is None:
            return self
        if log2_overflowed > self.log2_highest:
            return replace(self, log2_overflowed=log2_overflowed)
        return Ceiling(log2_overflowed - 1, 0, log2_overflowed)


def log2_highest(
    blocks: Sequence[Mapping[int, int]],
    format: FloatFormat,
    growth_interval: int,
    exact: Sequence[Mapping[int, int]] | None = None,
) -> Ceiling | None:
    """Return the largest scale at which a step overflows with a probability of at most 1/growth_interval; None without a step.

    Args:
        blocks: for blocks of steps in order, for how many steps the exponent of the largest gradient (rounded to 11 bits) was
            what. Several, so that a drift over the run is not taken for spread.
        growth_interval: a dynamic scaler that doubles every so many steps risks about one overflow in as many.
        exact: the same without the steps that overflowed, of which no more is known than a lower bound; they tell of no spread.

    The (1 - 1/growth_interval) quantile of the peaks is bounded from above with 95% confidence: by an order statistic, which
    assumes no distribution, where the steps suffice (3 growth intervals), else by ``normal_bound`` or the largest peak,
    whichever is more. The margin never takes scale 1 away, which no step seen has overflowed.
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
    if steps * probability >= RULE_OF_THREE:
        return Ceiling(seen)
    bound = normal_bound(blocks if exact is None else exact, probability)
    # A peak of exponent e lies in [2^e, 2^(e+1)), in the middle at e + 1/2; the bound falls into the exponent below it.
    largest = exponent if bound is None else max(exponent, math.floor(bound + 0.5))
    highest = max(log2_room(largest, format), min(seen, 0))
    return Ceiling(highest, seen - highest)


def normal_bound(blocks: Sequence[Mapping[int, int]], probability: float) -> float | None:
    """95% upper bound of the (1 - probability) quantile of the peaks' exponents, as if normal; None for too few steps.

    The largest of the blocks' mean + k s, with s pooled within the blocks and ``tolerance_factor`` as k.
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
    spread = math.sqrt(squares / freedom)
    return max(mean + tolerance_factor(n, freedom, probability) * spread for mean, n in zip(means, sizes, strict=True))


def _large_enough(blocks: Sequence[Mapping[int, int]]) -> list[Mapping[int, int]]:
    """Return the blocks, neighbours merged until each has FEWEST_IN_BLOCK steps (or there is one)."""
    merged: list[Mapping[int, int]] = []
    for block in blocks:
        if merged and min(sum(merged[-1].values()), sum(block.values())) < FEWEST_IN_BLOCK:
            merged[-1] = add_counts((merged[-1], block))
        else:
            merged.append(block)
    return merged


def tolerance_factor(n: int, freedom: float, probability: float) -> float:
    """Return the k for which mean + k s of n normal values is above their (1 - probability) quantile with 95% confidence.

    The one-sided tolerance limit of the NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.6.3 (after Natrella, 1963):
    k = (z + sqrt(z^2 - a b)) / a, a = 1 - c^2 / (2 f), b = z^2 - c^2 / n, with the normal quantiles z of the share covered and
    c of the confidence, and f the degrees of freedom of s.
    """
    covered, confidence = NormalDist().inv_cdf(1 - probability), NormalDist().inv_cdf(CONFIDENCE)
    a = 1 - confidence**2 / (2 * freedom)
    b = covered**2 - confidence**2 / n
    return (covered + math.sqrt(max(covered**2 - a * b, 0.0))) / a


def overflowed_at(events: Iterable[Event]) -> int | None:
    """Least k such that the run overflowed at 2^k (a scale between two powers counts as the one above); None where it did not.

    Evidence is an infinity in the backward of a forward that was finite; of a NaN, only where the values of the same tensor
    had come near the top: other NaNs are of the arithmetic, at any scale.
    """
    scales = [
        event.loss_scale
        for event in events
        if event.loss_scale
        and 0 < event.loss_scale < math.inf
        and not forward_broke(event)
        and (event.value == "inf" or max(event.last_maxima, default=0.0) >= NEAR_OVERFLOW)
    ]
    return math.ceil(math.log2(min(scales))) if scales else None


def tolerated_overflows(steps: int, probability: float) -> int:
    """Return how many of the largest peaks may be passed over, and the next still bounds the quantile with 95% confidence.

    The (m+1)-th largest of n values is at least the (1 - p) quantile unless at most m values lie beyond it:
    the largest m with BinomialCDF(m; n, p) <= 0.05, or 0. Where that is in the thousands, the normal distribution's, less
    one: its skewness, which that leaves out, is worth (z^2 - 1) / 6 = 0.3.
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
    """95% upper bound of the probability that a step overflows, ``overflows`` of ``steps`` having done so; None for no step.

    3/n where none did; otherwise the p with BinomialCDF(overflows; n, p) = 0.05 (Clopper and Pearson), by bisection, and
    from thousands on Wilson's score bound. Successive steps are taken as independent.
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
    """P(X <= m) for m = 0..last, X binomial(n, p); by default up to the first m that exceeds 1 - CONFIDENCE."""
    if p >= 1:
        return [0.0] * n + [1.0]
    values: list[float] = []
    total, log_term = 0.0, n * math.log1p(-p)
    for m in range(n + 1 if last is None else last + 1):
        total += math.exp(log_term)
        values.append(min(total, 1.0))
        if m == n or (last is None and total > 1 - CONFIDENCE):
            break
        log_term += math.log((n - m) / (m + 1)) + math.log(p) - math.log1p(-p)
    return values
