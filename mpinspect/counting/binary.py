"""An IEEE 754 binary encoding as three numbers: what counting by bits needs to know of it, in torch as in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.counting.layout import RowLayout


@dataclass(frozen=True)
class Binary:
    """An encoding with a sign, an exponent field and a mantissa.

    Args:
        mantissa_bits, bias: as the standard has them.
        layout: the row that holds its exponents.
    """

    mantissa_bits: int
    bias: int
    layout: RowLayout

    @property
    def infinity(self) -> int:
        """Magnitude bits of infinity; everything above is NaN."""
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign; also the largest integer of as many bits."""
        return self.infinity | (self.min_normal - 1)

    @property
    def min_normal(self) -> int:
        """Magnitude bits of the smallest normal value."""
        return 1 << self.mantissa_bits

    @property
    def slots(self) -> int:
        """Counters: zero, three per exponent, infinity, NaN."""
        return self.layout.length - 2
