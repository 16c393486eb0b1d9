"""The narrow floating-point encodings as data: what each code of a 16-bit, 8-bit, 6-bit or 4-bit format means.

NumPy has one of them, ml_dtypes most others, and some libraries hand over bare integers: so the values are worked out
here from the name alone, without any cast. Every value here is a normal number of float64, so that a flush-denormals mode
can't change one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mpinspect.counting.layout import RowLayout

#: What the codes beyond the numbers mean: infinities and NaNs as IEEE 754 has them; a NaN with every bit set and no infinity; a
#: NaN in the place of the negative zero; neither.
IEEE, ONE_NAN, UNSIGNED_ZERO, FINITE = "ieee", "fn", "fnuz", "finite"


@dataclass(frozen=True)
class NarrowEncoding:
    """One sign bit (none for a bare power of two), then the exponent, then the mantissa.

    Args:
        exponent_bits, mantissa_bits, bias: as IEEE 754 has them.
        special: IEEE, ONE_NAN, UNSIGNED_ZERO or FINITE.
        signed: False for e8m0, which has no sign and no zero.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str
    signed: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code; those above them in a byte mean nothing."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def item_size(self) -> int:
        """Bytes that an element takes."""
        return 1 if self.bits <= 8 else 2


#: By the names that NumPy, ml_dtypes and torch give them.
NARROW_ENCODINGS = {
    "float16": NarrowEncoding(5, 10, 15, IEEE),
    "bfloat16": NarrowEncoding(8, 7, 127, IEEE),
    "float8_e3m4": NarrowEncoding(3, 4, 3, IEEE),
    "float8_e4m3": NarrowEncoding(4, 3, 7, IEEE),
    "float8_e4m3fn": NarrowEncoding(4, 3, 7, ONE_NAN),
    "float8_e4m3fnuz": NarrowEncoding(4, 3, 8, UNSIGNED_ZERO),
    "float8_e4m3b11fnuz": NarrowEncoding(4, 3, 11, UNSIGNED_ZERO),
    "float8_e5m2": NarrowEncoding(5, 2, 15, IEEE),
    "float8_e5m2fnuz": NarrowEncoding(5, 2, 16, UNSIGNED_ZERO),
    "float8_e8m0fnu": NarrowEncoding(8, 0, 127, ONE_NAN, signed=False),
    "float6_e2m3fn": NarrowEncoding(2, 3, 1, FINITE),
    "float6_e3m2fn": NarrowEncoding(3, 2, 3, FINITE),
    "float4_e2m1fn": NarrowEncoding(2, 1, 1, FINITE),
}


@cache
def magnitudes(name: str) -> npt.NDArray[np.float64]:
    """Return the magnitude of every code that the format's bytes can hold, infinities and NaNs among them.

    Args:
        name: one of NARROW_ENCODINGS.

    Returns:
        float64, one for each code: 256 or 65536.
    """
    encoding = NARROW_ENCODINGS[name]
    codes = np.arange(1 << 8 * encoding.item_size, dtype=np.int64) & ((1 << encoding.bits) - 1)
    sign_bit = 1 << (encoding.bits - 1) if encoding.signed else 0
    plain = codes & ~sign_bit
    field, mantissa = plain >> encoding.mantissa_bits, plain & ((1 << encoding.mantissa_bits) - 1)
    if encoding.signed:
        significand = mantissa + ((field > 0).astype(np.int64) << encoding.mantissa_bits)
        field = np.maximum(field, 1)
    else:
        significand = np.ones_like(mantissa)
    values: npt.NDArray[np.float64] = np.ldexp(
        significand.astype(np.float64), field - encoding.bias - encoding.mantissa_bits
    )
    _set_special(values, codes, plain, encoding)
    values.setflags(write=False)
    return values


def _set_special(
    values: npt.NDArray[np.float64],
    codes: npt.NDArray[np.int64],
    plain: npt.NDArray[np.int64],
    encoding: NarrowEncoding,
) -> None:
    infinity = ((1 << encoding.exponent_bits) - 1) << encoding.mantissa_bits
    every_bit = infinity + (1 << encoding.mantissa_bits) - 1
    if encoding.special == IEEE:
        values[plain == infinity] = np.inf
        values[plain > infinity] = np.nan
    elif encoding.special == ONE_NAN:
        values[plain == every_bit] = np.nan
    elif encoding.special == UNSIGNED_ZERO:
        values[codes == every_bit + 1] = np.nan


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
