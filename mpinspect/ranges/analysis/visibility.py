"""What can be said of values that may have been flushed before they were counted.

A gradient that passed through FP16 at some loss scale shows no magnitude below its visibility floor: what was below it
is a zero now, beside the zeros that were zero from the start (ReLU makes many). The zeros bound how many values can
have gone, the floor bounds how large they were; between the bounds lies the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.serving import flush_exponent
from mpinspect.ranges.session import TensorWindow


@dataclass(frozen=True)
class Visibility:
    """The values that were counted, and the ``hidden`` ones that may have been flushed before.

    ``floor_exponent``: hidden magnitudes are at most 2^floor_exponent; None where nothing was flushed before.
    """

    histogram: ExponentHistogram
    floor_exponent: int | None = None

    @classmethod
    def of(cls, window: TensorWindow) -> Visibility:
        return cls(window.histogram, window.floor_exponent)

    @property
    def hidden(self) -> int:
        """Most values that can have been flushed before counting: the zeros, where there is a floor."""
        return self.histogram.zeros if self.floor_exponent is not None else 0

    def flushed_fraction(self, format: FloatFormat, log2_scale: int = 0) -> Interval:
        """Share of the non-zero values of x * 2^log2_scale that the format flushes, 0..1.

        The estimate is that of the visible values; the bounds let none or all of the zeros be hidden values.
        """
        visible, flushed = self.histogram.nonzero, self.histogram.flushed(format, log2_scale)
        every = visible + self.hidden
        estimate = flushed / visible if visible else 0.0
        high = (flushed + self.hidden) / every if every else 0.0
        low = estimate if self.hidden_flush(format, log2_scale) or not every else flushed / every
        return Interval(estimate, low, high)

    def already_flushed_fraction(self) -> Interval | None:
        """Share of the non-zero values that was flushed before counting, as bounds; None where none can have been.

        The estimate is 0: that none was (what the counts alone can't tell).
        """
        if self.floor_exponent is None:
            return None
        every = self.histogram.nonzero + self.hidden
        return Interval(0.0, 0.0, self.hidden / every if every else 0.0)

    def lost_l1_share(self, format: FloatFormat, log2_scale: int = 0) -> Interval:
        """Share of the L1 mass that is flushed: the visible values' estimate, with bounds that allow for the hidden ones."""
        share = self.histogram.lost_l1_share(format, log2_scale)
        if not self.hidden:
            return share
        ratio = self._hidden_mass_ratio()
        if ratio is None:
            return Interval(0.0, 0.0, 1.0)
        low = share.low if self.hidden_flush(format, log2_scale) else share.low / (1 + ratio)
        # (lost + hidden) / (whole + hidden) falls as the whole grows, so the whole's lower bound gives the upper one.
        return Interval(share.estimate, low, (share.high + ratio) / (1 + ratio))

    def likely_hidden_l1_share(self) -> float:
        """Share of the L1 mass that was *likely* flushed before counting, 0..1: a guess from the shape of the counts.

        Gradients spread smoothly over the exponents, so what lies below the floor is taken to hold no more values an
        octave than the lowest octave above it. True zeros alone (nothing near the floor) give 0.
        """
        if not self.hidden or self.floor_exponent is None or not len(self.histogram.counts):
            return 0.0
        lowest = self.floor_exponent + 1 - self.histogram.min_exponent
        near = int(self.histogram.counts[lowest]) if 0 <= lowest < len(self.histogram.counts) else 0
        # Rounding gathers 1.58 octaves in the lowest exponent; near / 1.58 values in every octave below 2^f weigh
        # 1.5 * 2^f * near / 1.58 together: about near * 2^f.
        # Relative to the largest exponent, so that tiny values leave neither sum at zero.
        top = self.histogram.max_exponent
        mass = min(near, self.hidden) * 2.0 ** min(self.floor_exponent - top, 0)
        return mass / (mass + self.histogram.shifted(-top).sum_abs().estimate)

    def hidden_flush(self, format: FloatFormat, log2_scale: int) -> bool:
        """Return whether every hidden value certainly flushes at this scale."""
        if self.floor_exponent is None:
            return True
        # Where subnormals are flushed the edge itself is kept.
        edge = flush_exponent(format) - int(format.flushes_subnormals)
        return self.floor_exponent + log2_scale <= edge

    def _hidden_mass_ratio(self) -> float | None:
        """Upper bound of the hidden over the visible L1 mass; None if nothing is visible."""
        if not len(self.histogram.counts) or self.floor_exponent is None:
            return None
        # Both sums relative to the largest exponent, and that cut, which keeps them in float64's range.
        top = self.histogram.max_exponent
        visible = self.histogram.shifted(-top).sum_abs().low
        return self.hidden * 2.0 ** min(max(self.floor_exponent - top, -500), 500) / visible
