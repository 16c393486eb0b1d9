"""The narrow floating-point encodings as data: the meaning of each code of a 16-bit, 8-bit, 6-bit or 4-bit format.

NumPy has one of these formats, ml_dtypes has most others, and some libraries return bare integers; therefore the values are
computed here from the format's name alone, without any cast. All non-zero finite values are normal in float64, so a
flush-denormals mode can't change them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mpinspect.counting.layout import NO_MINIMUM, RowLayout

#: Which codes are special: infinities and NaNs as in IEEE 754 (IEEE); no infinity, and NaN with every bit but the sign set
#: (ONE_NAN); NaN in place of negative zero (UNSIGNED_ZERO); no special codes (FINITE).
IEEE, ONE_NAN, UNSIGNED_ZERO, FINITE = "ieee", "fn", "fnuz", "finite"


@dataclass(frozen=True)
class NarrowEncoding:
    """A narrow format: one sign bit (except in e8m0), then the exponent field, then the mantissa.

    Args:
        exponent_bits, mantissa_bits, bias: as defined in IEEE 754.
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
        """The number of bits in a code; higher bits of its byte are ignored."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def item_size(self) -> int:
        """The size of an element in bytes."""
        return 1 if self.bits <= 8 else 2


#: Encodings by their names in NumPy, ml_dtypes and torch.
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
    """Return the magnitude of every code of the format's byte size, including infinities and NaNs.

    Args:
        name: one of NARROW_ENCODINGS.

    Returns:
        float64 array indexed by code, of length 256 or 65536.
    """
    encoding = NARROW_ENCODINGS[name]
    codes = np.arange(1 << 8 * encoding.item_size, dtype=np.int64) & ((1 << encoding.bits) - 1)
    sign_bit = encoding.signed << (encoding.bits - 1)
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
        mantissa_bits, bias: as defined in IEEE 754.
        layout: the layout of the row that holds its exponents.
    """

    mantissa_bits: int
    bias: int
    layout: RowLayout

    @property
    def infinity(self) -> int:
        """The magnitude bits of infinity; larger magnitude bits are NaNs."""
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def magnitude_mask(self) -> int:
        """A mask of all bits except the sign; also the largest signed integer of the same width."""
        return self.infinity | (self.min_normal - 1)

    @property
    def min_normal(self) -> int:
        """The magnitude bits of the smallest normal value."""
        return 1 << self.mantissa_bits

    @property
    def slots(self) -> int:
        """The number of counters: zero, three per exponent, infinity, NaN."""
        return self.layout.length - 2

    def float64_bits(self, magnitude: int) -> int:
        """Return the float64 bits of the value with these magnitude bits, by integer arithmetic; infinity's also for a NaN."""
        if magnitude >= self.infinity:
            return NO_MINIMUM
        if self.mantissa_bits == 52 or magnitude >= self.min_normal:
            return (magnitude << 52 - self.mantissa_bits) + (1023 - self.bias << 52)
        bits: int = struct.unpack("<q", struct.pack("<d", magnitude * 2.0 ** (1 - self.bias - self.mantissa_bits)))[0]
        return bits
