"""The results of a probe as plain data: FP16 gradients compared with FP32 gradients of the same batches."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.numeric.exponents import ExponentHistogram, ratio


@dataclass(frozen=True)
class GradientAgreement:
    """One weight gradient at one loss scale: the unscaled FP16 gradient compared with the FP32 reference, in element counts.

    Args:
        loss_scale: a power of two.
        nonzero: elements whose reference is finite and non-zero. If part of the gradient is rounding noise (the key
            third of a fused attention bias, zero in theory), that part is excluded.
        predicted_flushed: how many of ``nonzero`` FP16 would round to zero after scaling, computed from the reference's counts.
        measured_flushed: how many of ``nonzero`` were zero in the FP16 pass.
        lost_upstream: how many of ``measured_flushed`` have a reference value that FP16 could hold: a factor of their
            products had been rounded or flushed earlier, in an activation gradient for example.
        infs, nans: elements of the FP16 pass that are infinite or NaN: overflow.
        cosine: cosine similarity of the two gradients, -1..1, in float64; None if either is zero or non-finite.
        relative_error: L2 norm of the difference over the L2 norm of the reference, in float64; None as for ``cosine``.
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
        """Share of the non-zero elements predicted to flush, 0..1."""
        return self._fraction(self.predicted_flushed)

    @property
    def measured_flushed_fraction(self) -> float:
        """Share of the non-zero elements that flushed in the FP16 pass, 0..1."""
        return self._fraction(self.measured_flushed)

    @property
    def lost_upstream_fraction(self) -> float:
        """Share of the non-zero elements lost upstream, 0..1."""
        return self._fraction(self.lost_upstream)

    @property
    def kept_by_rounding_fraction(self) -> float:
        """Share of the non-zero elements predicted to flush that survived, 0..1: rounding moved them above the flush edge."""
        return self._fraction(self.predicted_flushed - (self.measured_flushed - self.lost_upstream))

    @property
    def difference(self) -> float:
        """Measured minus predicted flushed fraction; equals the lost-upstream minus the kept-by-rounding fraction."""
        return self.measured_flushed_fraction - self.predicted_flushed_fraction

    @property
    def overflowed(self) -> int:
        """Number of elements of the FP16 pass that are infinite or NaN."""
        return self.infs + self.nans

    def _fraction(self, count: int) -> float:
        return ratio(count, self.nonzero)


@dataclass(frozen=True)
class LayerProbe:
    """One parameter's gradient over all batches.

    Args:
        name: the parameter's dotted path.
        shape: its shape.
        histogram: histogram of the FP32 reference gradient over all batches.
        unscaled: the comparison at loss scale 1.
        scaled: the comparison at the second loss scale; None if there is no second scale.
        in_half: whether the gradient was rounded to FP16, inferred from every value being representable in FP16.
            Under autocast, the gradients of normalisation layers and embeddings are FP32.
        rounding_noise: whether the gradient is zero in theory (a bias before BatchNorm), so that it holds only rounding
            noise.
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
        """Whether the prediction applies to this gradient: it was rounded to FP16 and is not rounding noise."""
        return self.in_half and not self.rounding_noise
