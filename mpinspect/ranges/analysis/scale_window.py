"""The window of loss scales that serve every layer without overflow, and the layers for which there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.noise import without_noise
from mpinspect.ranges.analysis.report import ScaleConflict
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE, NEGLIGIBLE_L1_SHARE, LostMass, least_log2_scale
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.session import TensorKey

_Found = TypeVar("_Found")

#: Powers of two that the recommended scale leaves below the largest one without overflow. The largest gradients of two
#: stretches of one training (the last 100 and the last 500 steps of a digits classifier) agreed within 2 of them, and
#: the windows of one run are fewer steps than the run: one more.
HEADROOM = 3

#: As many pairs of layers as a person reads.
MAX_CONFLICTS = 5


@dataclass(frozen=True)
class GradientRange:
    """One gradient, its values unscaled.

    ``noise_ceiling``: magnitudes up to it are rounding noise; ``is_noise``: all of them are, so no scale need serve it.
    """

    key: TensorKey
    seen: Visibility
    noise_ceiling: float = 0.0
    is_noise: bool = False

    @property
    def histogram(self) -> ExponentHistogram:
        return self.seen.histogram

    @property
    def is_served(self) -> bool:
        """Whether a scale has to serve it."""
        return bool(len(self.histogram.counts)) and not self.is_noise

    def log2_lowest(self, format: FloatFormat, tolerance: float = LOST_L1_TOLERANCE) -> int | None:
        """Least k that serves what was seen of it."""
        return least_log2_scale(self.histogram, format, tolerance)

    def needs(self, format: FloatFormat, tolerance: float) -> ScaleNeeds:
        """Return what a scale must do for it; it holds a value."""
        lost = _known(LostMass.of(self.histogram, format))
        hidden, floor = self.seen.hidden, self.seen.floor_exponent
        lowest = lost.least_log2_scale(tolerance)
        signal = without_noise(self.histogram, self.noise_ceiling)
        # The ceiling is the whole run's: over a few steps all values of a gradient that is no noise can lie below it.
        is_part = signal is not self.histogram and len(signal.counts)
        lost_signal = _known(LostMass.of(signal, format)) if is_part else lost
        return ScaleNeeds(
            lowest,
            lost.least_log2_scale(tolerance, hidden=hidden, floor_exponent=floor) if hidden else lowest,
            lost_signal.least_log2_scale(NEGLIGIBLE_L1_SHARE),
        )


class ScaleNeeds(NamedTuple):
    """Least k of one gradient: that serves what was seen of it (``log2_lowest``), that serves it whatever was flushed before it
    was counted (``log2_certain``), and at which next to nothing that was seen and is not noise is lost (``log2_ample``)."""

    log2_lowest: int
    log2_certain: int
    log2_ample: int


@dataclass(frozen=True)
class ScaleWindow:
    """Powers of two: the exponents k of scales 2^k.

    Args:
        log2_lowest: least k at which every layer is served, by what was seen, over the run and in each of its blocks; it may be
            negative.
        log2_certain: the same whatever was flushed before counting; at least ``log2_lowest``.
        log2_ample: least k at which next to nothing is lost (NEGLIGIBLE_L1_SHARE).
        log2_highest: largest k without overflow.
    """

    log2_lowest: int
    log2_certain: int
    log2_ample: int
    log2_highest: int

    @property
    def is_empty(self) -> bool:
        return self.log2_lowest > self.log2_highest

    def serving(self, others: Iterable[ScaleWindow]) -> ScaleWindow:
        """Return the window whose least scales serve the layers in these windows too; its top stays."""
        parts = [self, *others]
        return replace(
            self,
            log2_lowest=max(part.log2_lowest for part in parts),
            log2_certain=max(part.log2_certain for part in parts),
        )

    def choose(self, headroom: int = HEADROOM) -> int:
        """max(lowest, min(highest - headroom, ample)), and never above the highest.

        Nothing is gained beyond what is ample, nor by going below 1 further than the headroom asks. In an empty
        window the highest: an overflow costs the step, a flushed layer costs accuracy.
        """
        enough = max(self.log2_ample, self.log2_certain, 0)
        return min(self.log2_highest, max(self.log2_lowest, min(self.log2_highest - headroom, enough)))


def scale_window(
    gradients: Sequence[GradientRange],
    log2_highest: int | None,
    format: FloatFormat,
    tolerance: float = LOST_L1_TOLERANCE,
) -> ScaleWindow | None:
    """Return the window of these gradients; None where none holds a value that a scale should serve.

    ``log2_highest`` is from the peaks of the steps; None takes the largest value counted.
    """
    served = [gradient for gradient in gradients if gradient.is_served]
    if not served:
        return None
    if log2_highest is None:
        log2_highest = min(_known(gradient.histogram.max_log2_scale(format)) for gradient in served)
    lowest, certain, ample = (max(ks) for ks in zip(*(g.needs(format, tolerance) for g in served), strict=True))
    return ScaleWindow(lowest, certain, ample, log2_highest)


def scale_conflicts(
    gradients: Sequence[GradientRange], format: FloatFormat, tolerance: float = LOST_L1_TOLERANCE
) -> tuple[ScaleConflict, ...]:
    """Pairs of layers that no one scale can serve, worst first, at most MAX_CONFLICTS; a layer may conflict with itself."""
    served = [gradient for gradient in gradients if gradient.is_served]
    needs_large = sorted(((_known(g.log2_lowest(format, tolerance)), g.key.name) for g in served), reverse=True)
    needs_small = sorted((_known(g.histogram.max_log2_scale(format)), g.key.name) for g in served)
    pairs = [
        ScaleConflict(large, lowest, small, highest)
        for lowest, large in needs_large[:MAX_CONFLICTS]
        for highest, small in needs_small[:MAX_CONFLICTS]
        if lowest > highest
    ]
    return tuple(sorted(pairs, key=lambda pair: pair.log2_highest - pair.log2_lowest)[:MAX_CONFLICTS])


def gradient_ranges(
    histograms: dict[TensorKey, Visibility], ceilings: dict[TensorKey, float], noise: frozenset[TensorKey]
) -> tuple[GradientRange, ...]:
    """Return the gradients among these tensors, with what is known of their noise."""
    return tuple(
        GradientRange(key, seen, ceilings.get(key, 0.0), key in noise)
        for key, seen in histograms.items()
        if key.kind in GRADIENT_KINDS
    )


def _known(found: _Found | None) -> _Found:
    assert found is not None, "a histogram with values has every scale"
    return found
