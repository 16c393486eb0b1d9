"""One gradient of an FP16 pass held against its FP32 reference, summed over batches."""

from __future__ import annotations

import math

import torch

from mpinspect.counting import count_exponents


class GradientDifference:
    """Counts and sums, in float64, over any number of pairs of gradients of one parameter.

    Args:
        flush_edge: magnitudes up to it are flushed by the format of the pass.
        loss_scale: what the gradients of the pass are multiplied by.
    """

    def __init__(self, flush_edge: float, loss_scale: float) -> None:
        self._edge = flush_edge / loss_scale
        self._scale = loss_scale
        self.flushed = 0
        self.lost_upstream = 0
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
        zero = (half == 0) & (reference != 0) & reference.isfinite()
        self.flushed += int(zero.sum())
        exact = reference.double()
        self.lost_upstream += int((zero & (exact.abs() > self._edge)).sum())
        self._add_sums(exact, half.double() / self._scale)

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
        squares = self._reference_square * self._half_square
        if not self._all_finite or not squares:
            return None
        # Rounding may take it a hair beyond 1.
        return max(-1.0, min(1.0, self._product / math.sqrt(squares)))

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
    """Whether every finite value is one that FP16 has."""
    finite = values[values.isfinite()]
    return bool((finite.half().to(finite.dtype) == finite).all())
