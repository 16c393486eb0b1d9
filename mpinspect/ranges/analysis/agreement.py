"""What a probe found: FP16 gradients held against FP32 ones of the same batches, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram


@dataclass(frozen=True)
class GradientAgreement:
    """One weight gradient at one loss scale: the FP16 pass, unscaled, against the FP32 reference. Counts are of elements.

    Args:
        loss_scale: a power of two.
        nonzero: elements whose reference is finite and not zero; without those that are rounding noise where a part of the
            gradient is (the key third of a fused attention bias, zero in theory).
        predicted_flushed: of these, those whose scaled reference FP16 rounds to zero: from the reference's counts alone.
        measured_flushed: of these, those that came out zero in the FP16 pass.
        lost_upstream: of the measured ones, those that FP16 would hold at their reference value: what their products were
            made of had been rounded or flushed before, in an activation gradient for example.
        infs, nans: elements of the FP16 pass that are infinite or NaN: overflow.
        cosine: between both gradients, -1..1, in float64; None where one is zero or not finite.
        relative_error: L2 norm of the difference over that of the reference, in float64; None likewise.
    """

    loss_scale: float
    nonzero: int
    predicted_flushed: int
    measured_flushed: int
    lost_upstream: int
    infs: int
    nans: int
    cosine: float | None
    relative_error: float | None

    @property
    def predicted_flushed_fraction(self) -> float:
        """Predicted flushed elements over non-zero ones, 0..1."""
        return self._fraction(self.predicted_flushed)

    @property
    def measured_flushed_fraction(self) -> float:
        """Measured flushed elements over non-zero ones, 0..1."""
        return self._fraction(self.measured_flushed)

    @property
    def lost_upstream_fraction(self) -> float:
        """Elements lost upstream over non-zero ones, 0..1."""
        return self._fraction(self.lost_upstream)

    @property
    def kept_by_rounding_fraction(self) -> float:
        """Elements predicted to flush that did not, over non-zero ones, 0..1: rounding took them across the edge."""
        return self._fraction(self.predicted_flushed - (self.measured_flushed - self.lost_upstream))

    @property
    def difference(self) -> float:
        """Measured minus predicted flushed fraction: lost upstream minus kept by rounding."""
        return self.measured_flushed_fraction - self.predicted_flushed_fraction

    @property
    def overflowed(self) -> int:
        """Elements that are infinite or NaN."""
        return self.infs + self.nans

    def _fraction(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True)
class LayerProbe:
    """One parameter's gradient over all batches.

    Args:
        name: the parameter's dotted path.
        shape: its shape.
        histogram: of the FP32 reference, all batches together.
        unscaled: at loss scale 1.
        scaled: at the second scale; None if there is none.
        in_half: whether the gradient was rounded to FP16 at all: autocast keeps those of normalisation layers and embeddings in
            FP32. Told from the values: all of them are FP16's.
        rounding_noise: the gradient is zero in theory (a bias before BatchNorm); what there is of it is rounding noise.
    """

    name: str
    shape: tuple[int, ...]
    histogram: ExponentHistogram
    unscaled: GradientAgreement
    scaled: GradientAgreement | None
    in_half: bool
    rounding_noise: bool

    @property
    def comparable(self) -> bool:
        """Whether the prediction is about this gradient: FP16 held it, and it is not noise."""
        return self.in_half and not self.rounding_noise
