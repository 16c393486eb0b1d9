"""From the largest gradients of the sampled steps to the largest scale that is safe, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpinspect.exponents import NEAR_TOP_SIGNIFICAND
from mpinspect.formats import FloatFormat

#: How sure the bounds are.
CONFIDENCE = 0.95
#: Zero events in n trials: the rate is at most 3/n with 95% confidence, for ln(1 - 0.95) = -2.996 ("rule of three").
RULE_OF_THREE = 3.0


def log2_room(peak_exponent: int, format: FloatFormat) -> int:
    """Largest k for which a value of this peak exponent (11 bits) does not overflow: 15 - peak for FP16, exactly.

    Formats of fewer bits overflow earlier in their highest power of two; there one k less, to be sure.
    """
    return format.max_exponent - peak_exponent - int(format.overflow_significand < NEAR_TOP_SIGNIFICAND)


def log2_highest(peaks: Mapping[int, int], format: FloatFormat, growth_interval: int) -> int | None:
    """Largest k at which a step overflows with a probability of at most 1/growth_interval; None without a step.

    Args:
        peaks: for how many steps the exponent of the largest gradient (rounded to 11 bits) was what.
        growth_interval: a dynamic scaler that doubles every so many steps risks about one overflow in as many.

    The (1 - 1/growth_interval) quantile of the peaks is bounded from above by an order statistic, which assumes no
    distribution; where the steps are too few for any order statistic (under 3 growth intervals), the largest peak is taken.
    """
    steps = sum(peaks.values())
    if not steps:
        return None
    exceedances = tolerated_overflows(steps, 1 / growth_interval)
    for exponent in sorted(peaks, reverse=True):
        if peaks[exponent] > exceedances:
            return log2_room(exponent, format)
        exceedances -= peaks[exponent]
    raise AssertionError("fewer exceedances are tolerated than there are steps")


def tolerated_overflows(steps: int, probability: float) -> int:
    """How many of the largest peaks may be passed over, and the next still bounds the quantile with 95% confidence.

    The (m+1)-th largest of n values is at least the (1 - p) quantile unless at most m values lie beyond it:
    the largest m with BinomialCDF(m; n, p) <= 0.05, or 0.
    """
    passed_over = -1
    for m, cumulative in enumerate(_binomial_cdf(steps, probability)):
        if cumulative > 1 - CONFIDENCE:
            break
        passed_over = m
    return max(passed_over, 0)


def overflow_probability_bound(overflows: int, steps: int) -> float | None:
    """95% upper bound of the probability that a step overflows, ``overflows`` of ``steps`` having done so; None for no step.

    3/n where none did; otherwise the p with BinomialCDF(overflows; n, p) = 0.05 (Clopper and Pearson), by bisection.
    Successive steps are taken as independent.
    """
    if not steps:
        return None
    if not overflows:
        return min(1.0, RULE_OF_THREE / steps)
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
    total = 0.0
    for m in range(n + 1 if last is None else last + 1):
        log_term = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
        total += math.exp(log_term + m * math.log(p) + (n - m) * math.log1p(-p))
        values.append(min(total, 1.0))
        if last is None and total > 1 - CONFIDENCE:
            break
    return values
