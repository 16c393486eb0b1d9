"""When a loss scale serves a layer: the tolerated loss, and the least scale that keeps to it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mpinspect.exponents import MEAN_SIGNIFICAND, ExponentHistogram
from mpinspect.formats import FloatFormat

#: A layer is served when at most this share of the sum of its gradient's magnitudes is flushed to zero.
#: Measured on the demo's language model, trained with FP16 products (benchmarks/loss_scale_window.py): at scale 1, where
#: the worst layer loses 0.1, it ends at a validation loss of 4.98 against FP32's 4.64; at 8 (0.014) it trains, but on
#: another path; at 128 (0.0002) and beyond it follows FP32 to within 0.01. The flushed *fraction* of elements is no such
#: measure: small elements are many and weigh little.
LOST_L1_TOLERANCE = 1e-3

#: From this lost L1 share on it is a warning. Between the two a scale is advised and nothing is wrong: a digits classifier
#: of four sigmoid layers that loses 0.0017 trains to the same loss at scale 1 as in FP32; the language model at 0.014
#: takes another path.
ALARMING_L1_SHARE = 1e-2

#: A scale is ample when every layer loses at most this share of its L1 mass: FP32, in which the unscaled gradient is
#: used, does not resolve it (2^-24 is its rounding). Asking for no flushed element at all would let the smallest of a
#: billion decide: in the same model that takes 2^20, which leaves no headroom, and 2^13 loses 1e-8.
NEGLIGIBLE_L1_SHARE = 2.0**-24


def flush_exponent(format: FloatFormat) -> int:
    """Exponent of the magnitude up to which the format flushes (-25 for FP16)."""
    return format.min_normal_exponent if format.flushes_subnormals else format.min_subnormal_exponent - 1


def least_log2_scale(
    histogram: ExponentHistogram,
    format: FloatFormat,
    tolerance: float = LOST_L1_TOLERANCE,
    *,
    hidden: int = 0,
    floor_exponent: int | None = None,
) -> int | None:
    """Least k (it may be negative) at which x * 2^k loses at most ``tolerance`` of its L1 mass; None without a value.

    By the estimate of ``ExponentHistogram.lost_l1_share``. With ``hidden`` and ``floor_exponent`` the k is one that
    serves the tensor whatever was flushed before it was counted: ``hidden`` more elements of up to 2^floor_exponent
    each are taken to be lost up to the flush edge.

    Raises:
        ValueError: ``tolerance`` is not in (0, 1).
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is a share of the L1 mass and must lie in (0, 1), not {tolerance}")
    if not len(histogram.counts):
        return None
    top = histogram.max_exponent
    edges = np.arange(histogram.min_exponent, top + 1)
    lost, whole = _lost_mass(histogram, powers_lost=not format.flushes_subnormals)
    allowed = tolerance * whole
    if hidden and floor_exponent is not None:
        lost = lost + hidden * np.exp2(np.minimum(edges, floor_exponent) - float(top))
    served = np.flatnonzero(lost <= allowed)
    if served.size:
        edge = int(edges[served[-1]])
    else:
        edge = histogram.min_exponent - 1
        if (
            hidden
            and floor_exponent is not None
            and hidden * 2.0 ** min(max(floor_exponent - top, -500), 500) > allowed
        ):
            edge = min(edge, math.floor(math.log2(allowed / hidden)) + top)
    return flush_exponent(format) - edge


def _lost_mass(histogram: ExponentHistogram, *, powers_lost: bool) -> tuple[npt.NDArray[np.float64], float]:
    """Mass lost with the flush edge at each exponent of the histogram, and the whole mass, in units of 2^max_exponent."""
    powers = histogram.powers_of_two.astype(np.float64)
    tops = histogram.near_top.astype(np.float64)
    other = histogram.counts.astype(np.float64) - powers - tops
    unit = np.exp2(np.arange(1 - len(powers), 1, dtype=np.float64))
    mass = unit * (powers + other * MEAN_SIGNIFICAND + tops * 2.0)
    below = np.cumsum(mass) - mass
    return below + (unit * powers if powers_lost else 0.0), float(mass.sum())
