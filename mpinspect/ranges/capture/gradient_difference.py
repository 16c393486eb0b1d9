"""One gradient of an FP16 pass held against its FP32 reference, summed over batches."""

from __future__ import annotations

import math

import torch

from mpinspect.counting import count_exponents
from mpinspect.numeric.exponents import ExponentHistogram


class GradientDifference:
    """Counts, and sums in float64, over any number of pairs of gradients of one parameter.

    Attributes:
        vanished: the *reference's* values of the elements that are not zero there and came out zero in the FP16 pass.
        infs, nans: elements of the FP16 pass.
        in_half: whether every finite value of the FP16 pass, still scaled, is one that FP16 has.

    Args:
        loss_scale: what the gradients of the FP16 pass are multiplied by.
    """

    def __init__(self, loss_scale: float) -> None:
        self._scale = loss_scale
        self.vanished = ExponentHistogram.empty()
        self.infs = 0
        self.nans = 0
        self.in_half = True
        self._all_finite = True
        self._product = self._reference_square = self._half_square = self._error_square = 0.0

    def add(self, reference: torch.Tensor, half: torch.Tensor | None) -> None:
        """Take in one pair of tensors of one shape; ``half`` is scaled, None counts as zeros. Waits for the device."""
        reference = _flat(reference)
        half = torch.zeros_like(reference) if half is None else _flat(half)
        counts = count_exponents(half)
        self.infs += counts.infs
        self.nans += counts.nans
        self.in_half &= _holds_half(half)
        self.vanished += count_exponents(reference[(half == 0) & (reference != 0) & reference.isfinite()])
        self._add_sums(reference.double(), half.double() / self._scale)

    def _add_sums(self, reference: torch.Tensor, half: torch.Tensor) -> None:
        error = half - reference
        sums = [float(a.dot(b)) for a, b in ((half, reference), (reference, reference), (half, half), (error, error))]
        self._all_finite &= all(map(math.isfinite, sums))
        self._product += sums[0]
        self._reference_square += sums[1]
        self._half_square += sums[2]
        self._error_square += sums[3]

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both; None where one is zero or not finite."""
        norms = math.sqrt(self._reference_square) * math.sqrt(self._half_square) if self._all_finite else 0.0
        # Rounding may take the quotient a hair beyond 1.
        return max(-1.0, min(1.0, self._product / norms)) if norms else None

    @property
    def relative_error(self) -> float | None:
        """L2 norm of the difference over that of the reference; None where that is zero or something is not finite."""
        if not self._all_finite or not self._reference_square:
            return None
        return math.sqrt(self._error_square / self._reference_square)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return dense.reshape(-1)


def _holds_half(values: torch.Tensor) -> bool:
    finite = values[values.isfinite()]
    return bool((finite.half().to(finite.dtype) == finite).all())
