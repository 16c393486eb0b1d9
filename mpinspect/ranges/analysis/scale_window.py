"""Computes the window of loss scales that serve every layer without overflow, and the layers that conflict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FloatFormat
from mpinspect.ranges.analysis.noise import without_noise
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE, NEGLIGIBLE_L1_SHARE, LostMass
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.windows.tensors import TensorKey

_Found = TypeVar("_Found")

#: Powers of two that the recommended scale stays below the largest scale without overflow. The largest gradients of two
#: stretches of one training (the last 100 and the last 500 steps of a digits classifier) agreed within 2 powers of two; one
#: more is added because a run's windows hold fewer steps than the run.
HEADROOM = 3


@dataclass(frozen=True)
class GradientRange:
    """The unscaled values of one gradient.

    Magnitudes up to ``noise_ceiling`` are rounding noise. If ``is_noise``, the whole gradient is rounding noise and needs no
    scale.
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
        """Whether a scale has to serve this gradient: it has a finite non-zero value and is not rounding noise."""
        return bool(len(self.histogram.counts)) and not self.is_noise

    def needs(self, format: FloatFormat, tolerance: float) -> ScaleNeeds:
        """Return the least scales for this gradient, which must have a finite non-zero value."""
        lost = _known(LostMass.of(self.histogram, format))
        hidden, floor = self.seen.hidden, self.seen.floor_exponent
        lowest = certain = lost.least_log2_scale(tolerance)
        if hidden:
            certain = lost.least_log2_scale(tolerance, hidden=hidden, floor_exponent=floor)
        signal = without_noise(self.histogram, self.noise_ceiling)
        # The ceiling is from the whole run: within a few steps even a true gradient can lie entirely below it.
        if signal is not self.histogram:
            lost = LostMass.of(signal, format) or lost
        return ScaleNeeds(lowest, certain, lost.least_log2_scale(NEGLIGIBLE_L1_SHARE))


class ScaleNeeds(NamedTuple):
    """The least k for one gradient: ``log2_lowest`` serves the counted values, ``log2_certain`` serves the gradient in spite of
    any values flushed before counting, ``log2_ample`` loses at most NEGLIGIBLE_L1_SHARE of the counted values without noise."""

    log2_lowest: int
    log2_certain: int
    log2_ample: int


@dataclass(frozen=True)
class ScaleWindow:
    """The window of safe loss scales 2^k, as exponents k.

    A scale serves a layer if at most a tolerated share of its gradient's L1 mass is flushed to zero (serving.py).

    Args:
        log2_lowest: least k that serves the counted values of every layer, over the run and in each of its blocks; may
            be negative.
        log2_certain: least k that serves every layer in spite of any values flushed before counting; at least ``log2_lowest``.
        log2_ample: least k where every layer loses at most NEGLIGIBLE_L1_SHARE of its L1 mass.
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
        """Return the window with its lower ends raised to serve the layers of the other windows too; its top is unchanged."""
        parts = [self, *others]
        return replace(
            self,
            log2_lowest=max(part.log2_lowest for part in parts),
            log2_certain=max(part.log2_certain for part in parts),
        )

    def choose(self, headroom: int = HEADROOM) -> int:
        """Return the k to recommend: max(lowest, min(highest - headroom, enough)), but at most the highest.

        ``enough`` is the largest of ample, certain and 0: a larger scale gains nothing, and one below 1 only leaves
        headroom. For an empty window the result is the highest: above it steps overflow, below it layers lose more accuracy.
        """
        enough = max(self.log2_ample, self.log2_certain, 0)
        return min(self.log2_highest, max(self.log2_lowest, min(self.log2_highest - headroom, enough)))


def scale_window(
    gradients: Sequence[GradientRange], format: FloatFormat, tolerance: float = LOST_L1_TOLERANCE
) -> ScaleWindow | None:
    """Return the window of these gradients, its top by the largest counted value; None if no gradient has to be served."""
    served = [gradient for gradient in gradients if gradient.is_served]
    if not served:
        return None
    highest = min(_known(gradient.histogram.max_log2_scale(format)) for gradient in served)
    lowest, certain, ample = (max(ks) for ks in zip(*(g.needs(format, tolerance) for g in served), strict=True))
    return ScaleWindow(lowest, certain, ample, highest)


def gradient_ranges(
    histograms: dict[TensorKey, Visibility], ceilings: dict[TensorKey, float], noise: frozenset[TensorKey]
) -> tuple[GradientRange, ...]:
    """Return the gradients among these tensors, with their noise ceilings and whether they are noise."""
    return tuple(
        GradientRange(key, seen, ceilings.get(key, 0.0), key in noise)
        for key, seen in histograms.items()
        if key.kind in GRADIENT_KINDS
    )


def _known(found: _Found | None) -> _Found:
    assert found is not None, "a histogram with values has every scale"
    return found
