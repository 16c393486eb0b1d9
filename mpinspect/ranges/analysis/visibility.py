"""Bounds on values that may have been flushed before they were counted.

A gradient that passed through FP16 at some loss scale has no magnitude below its visibility floor: smaller values became zeros,
like the elements that were zero from the start (ReLU makes many). The number of zeros bounds how many values were flushed, and
the floor bounds how large they were; the true figures lie between these bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, Interval, ratio
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow

#: Minimum number of samples of a gradient that counts as always zero.
_FEWEST_SILENT = 3


def always_zero(totals: Mapping[TensorKey, TensorWindow]) -> list[str]:
    """Return the weights of modules whose weight gradients were all zero in all samples after rounding to 16 bits."""
    silent: dict[str, list[str]] = defaultdict(list)
    heard: set[str] = set()
    for key, window in totals.items():
        if key.kind == WEIGHT_GRADIENT and window.samples:
            module, histogram = key.name.rpartition(".")[0], window.histogram
            is_silent = not histogram.nonzero and not histogram.nonfinite and window.floor_exponent is not None
            if is_silent and window.samples >= _FEWEST_SILENT:
                silent[module].append(key.name)
            else:
                heard.add(module)
    return [name for module in silent if module not in heard for name in silent[module]]


@dataclass(frozen=True)
class Visibility:
    """The counted values of a tensor, and a bound on the ``hidden`` values that may have been flushed before counting.

    Hidden magnitudes are at most 2^floor_exponent; ``floor_exponent`` is None if no value was flushed before counting.
    """

    histogram: ExponentHistogram
    floor_exponent: int | None = None

    @classmethod
    def of(cls, window: TensorWindow) -> Visibility:
        return cls(window.histogram, window.floor_exponent)

    @property
    def hidden(self) -> int:
        """Largest possible number of values flushed before counting: the zeros if there is a floor, else 0."""
        return self.histogram.zeros if self.floor_exponent is not None else 0

    def flushed_fraction(self, format: FloatFormat, log2_scale: int = 0) -> Interval:
        """Return the share of the non-zero values of x * 2^log2_scale that the format flushes, 0..1.

        The estimate covers the visible values only; the bounds assume that no zero or every zero is a hidden value.
        """
        visible, flushed = self.histogram.nonzero, self.histogram.flushed(format, log2_scale)
        every = visible + self.hidden
        estimate = low = ratio(flushed, visible)
        if not self.hidden_flush(format, log2_scale):
            low = ratio(flushed, every)
        return Interval(estimate, low, ratio(flushed + self.hidden, every))

    def already_flushed_fraction(self) -> Interval | None:
        """Return bounds on the share of the non-zero values flushed before counting; None if no value can have been flushed.

        The estimate is set to 0, the lower bound, as the counts alone allow no better one.
        """
        if self.floor_exponent is None:
            return None
        every = self.histogram.nonzero + self.hidden
        return Interval(0.0, 0.0, ratio(self.hidden, every))

    def lost_l1_share(self, format: FloatFormat, log2_scale: int = 0) -> Interval:
        """Return the flushed share of the L1 mass: an estimate for the visible values, with bounds that include hidden ones.

        Only hidden values at or below the flush edge of this scale can be lost.
        """
        share = self.histogram.lost_l1_share(format, log2_scale)
        if not self.hidden or self.floor_exponent is None:
            return share
        ratio = self._hidden_mass_ratio(format.flush_exponent - log2_scale)
        every = self._hidden_mass_ratio(self.floor_exponent)
        if ratio is None or every is None:
            return Interval(0.0, 0.0, 1.0)
        # Hidden values above the flush edge are not lost, but count in the denominator.
        low = share.low if self.hidden_flush(format, log2_scale) else share.low / (1 + every)
        # (lost + hidden) / (whole + hidden) falls as the whole grows, so the whole's lower bound gives the upper one.
        return Interval(share.estimate, low, (share.high + ratio) / (1 + ratio))

    def likely_hidden_l1_share(self) -> float:
        """Return the share of the L1 mass *likely* flushed before counting, 0..1: a guess from the shape of the counts.

        Gradients spread smoothly over the exponents, so each octave below the floor is assumed to hold no more values
        than the lowest octave above the floor. If no values lie near the floor, all zeros count as true zeros: the
        result is 0.
        """
        if not self.hidden or self.floor_exponent is None or not len(self.histogram.counts):
            return 0.0
        lowest = self.floor_exponent + 1 - self.histogram.min_exponent
        near = int(self.histogram.counts[lowest]) if 0 <= lowest < len(self.histogram.counts) else 0
        # Rounding gathers 1.58 octaves in the lowest exponent, so each octave below 2^f holds near / 1.58 values; together
        # these weigh 1.5 * 2^f * near / 1.58, or about near * 2^f.
        # Both sums are relative to the largest exponent, so that tiny values don't underflow.
        top = self.histogram.max_exponent
        mass = min(near, self.hidden) * 2.0 ** min(self.floor_exponent - top, 0)
        return mass / (mass + self.histogram.shifted(-top).sum_abs().estimate)

    def hidden_flush(self, format: FloatFormat, log2_scale: int) -> bool:
        """Return whether every hidden value certainly flushes at this scale."""
        if self.floor_exponent is None:
            return True
        # In a format that flushes subnormals a value exactly at the edge survives.
        edge = format.flush_exponent - int(format.flushes_subnormals)
        return self.floor_exponent + log2_scale <= edge

    def _hidden_mass_ratio(self, edge: int) -> float | None:
        """Return an upper bound of hidden L1 mass (values up to 2^edge) divided by visible mass; None without visible mass."""
        if not len(self.histogram.counts) or self.floor_exponent is None:
            return None
        # Both sums are relative to the largest exponent, and the exponent is clamped, to stay within float64's range.
        top = self.histogram.max_exponent
        visible = self.histogram.shifted(-top).sum_abs().low
        return self.hidden * 2.0 ** min(max(min(self.floor_exponent, edge) - top, -500), 500) / visible
