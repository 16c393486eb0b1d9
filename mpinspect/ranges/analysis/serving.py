"""Defines when a loss scale serves a layer: the tolerated loss of L1 mass, and the least scale that stays within it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mpinspect.numeric.exponents import MEAN_SIGNIFICAND, ExponentHistogram
from mpinspect.numeric.formats import FloatFormat

#: A layer is served if at most this share of the sum of its gradient's magnitudes is flushed to zero. This is the one
#: threshold between "needed" and "not needed": every sentence on the loss scale depends on it.
#: Measured with FP16 products: at scale 1, a digits classifier of four sigmoid layers that loses 0.0017 trains to the same
#: loss as in FP32, as do, over three seeds, networks that lose 0.0055 and 0.0074. The demo's language model
#: (benchmarks/loss_scale_window.py) departs from FP32 at scale 8, where its worst layer loses 0.014; at scale 1, where that
#: layer loses 0.1, the validation loss ends at 4.98 against FP32's 4.64. The flushed *fraction* of elements is not a suitable
#: measure: small elements are many and weigh little. The recommended scale loses far less (NEGLIGIBLE_L1_SHARE).
LOST_L1_TOLERANCE = 1e-2

#: A scale is ample if every layer loses at most this share of its L1 mass: the rounding error of FP32, the format of the
#: unscaled gradient. If no element at all were allowed to flush, the smallest of a billion elements would decide: in the same
#: model that needs 2^20, which leaves no headroom, while 2^13 loses only 1e-8.
NEGLIGIBLE_L1_SHARE = 2.0**-24


def least_log2_scale(
    histogram: ExponentHistogram,
    format: FloatFormat,
    tolerance: float = LOST_L1_TOLERANCE,
    *,
    hidden: int = 0,
    floor_exponent: int | None = None,
) -> int | None:
    """Return the least k, possibly negative, such that x * 2^k loses at most ``tolerance`` of its L1 mass.

    The lost mass is the estimate of ``ExponentHistogram.lost_l1_share``. With ``hidden`` and ``floor_exponent`` the k serves
    the tensor in spite of values flushed before counting: ``hidden`` more elements are assumed, each losing 2^floor_exponent or
    the flush edge, whichever is smaller. Returns None if there is no finite non-zero value.

    Raises:
        ValueError: ``tolerance`` is not in (0, 1).
    """
    lost = LostMass.of(histogram, format)
    if lost is None:
        return None
    return lost.least_log2_scale(tolerance, hidden=hidden, floor_exponent=floor_exponent)


@dataclass(frozen=True)
class LostMass:
    """The L1 mass that a format flushes from a tensor at each scale; reusable for several tolerances.

    Args:
        max_exponent: exponent of the tensor's largest magnitude.
        flush_exponent: the format's ``flush_exponent``.
        lost: float64, the mass (sum of magnitudes) lost if the flush edge is at each of the tensor's exponents,
            ascending, in units of 2^max_exponent.
        whole: the tensor's whole mass, in units of 2^max_exponent.
    """

    max_exponent: int
    flush_exponent: int
    lost: npt.NDArray[np.float64]
    whole: float

    @classmethod
    def of(cls, histogram: ExponentHistogram, format: FloatFormat) -> LostMass | None:
        """Return the lost mass of a histogram in a format; None if the histogram has no finite non-zero value."""
        if not len(histogram.counts):
            return None
        powers = histogram.powers_of_two.astype(np.float64)
        tops = histogram.near_top.astype(np.float64)
        other = histogram.counts.astype(np.float64) - powers - tops
        unit = _units(len(powers))
        mass = unit * (powers + other * MEAN_SIGNIFICAND + tops * 2.0)
        lost = np.cumsum(mass) - mass
        if not format.flushes_subnormals:
            # A value exactly at the edge is flushed too: the tie rounds to even, which is zero.
            lost = lost + unit * powers
        return cls(histogram.max_exponent, format.flush_exponent, lost, float(mass.sum()))

    def least_log2_scale(self, tolerance: float, *, hidden: int = 0, floor_exponent: int | None = None) -> int:
        """Return the least k that loses at most ``tolerance``, like the function ``least_log2_scale``."""
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance is a share of the L1 mass and must lie in (0, 1), not {tolerance}")
        lost, allowed, top = self.lost, tolerance * self.whole, self.max_exponent
        lowest = top + 1 - len(lost)
        if hidden and floor_exponent is not None:
            edges = np.arange(lowest, top + 1)
            lost = lost + hidden * np.exp2(np.minimum(edges, floor_exponent) - float(top))
        served = (lost <= allowed).nonzero()[0]
        if served.size:
            return self.flush_exponent - (lowest + int(served[-1]))
        edge = lowest - 1
        if (
            hidden
            and floor_exponent is not None
            and hidden * 2.0 ** min(max(floor_exponent - top, -500), 500) > allowed
        ):
            edge = min(edge, math.floor(math.log2(allowed / hidden)) + top)
        return self.flush_exponent - edge


@lru_cache(maxsize=256)
def _units(bins: int) -> npt.NDArray[np.float64]:
    """Return the last ``bins`` powers of two up to 1, ascending, as a read-only array."""
    units: npt.NDArray[np.float64] = np.exp2(np.arange(1 - bins, 1, dtype=np.float64))
    units.setflags(write=False)
    return units
