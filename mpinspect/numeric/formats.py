"""Binary floating-point formats as data.

Every limit of a format (largest finite value, smallest subnormal, the edges beyond which a value is
flushed or overflows) is derived from a few numbers. Rounding is to nearest, ties to even, as specified
by IEEE 754 and the OCP FP8/MX specifications.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import torch

#: Types that ``as_format`` converts to a FloatFormat.
FormatLike: TypeAlias = "FloatFormat | str | torch.dtype | np.dtype[Any] | type[np.generic]"


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Args:
        name: the format's usual name, e.g. ``"float16"``.
        exponent_bits: width of the exponent field.
        mantissa_bits: stored mantissa bits (the leading 1 is not counted).
        has_infinity: whether the all-ones exponent field is reserved for inf and NaN (IEEE 754). Without it,
            that field holds numbers too, and overflowing values saturate or become NaN.
        reserved_top_codes: how many of the largest codes are NaN although ``has_infinity`` is false
            (1 in E4M3 "FN", 0 in E2M1).
        lowest_subnormal_exponent: exponent of the smallest subnormal if ``mantissa_bits`` does not
            determine it (TF32 has FP32's range: 2^-149).
        flushes_subnormals: whether the hardware treats subnormals as zero (matrix units of AMD's MI200): every
            value below the smallest normal before rounding is flushed.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    reserved_top_codes: int = 0
    lowest_subnormal_exponent: int | None = None
    flushes_subnormals: bool = False

    @property
    def bias(self) -> int:
        """Exponent bias: 2^(exponent_bits-1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_normal_exponent(self) -> int:
        """Exponent of the smallest normal value (-14 for FP16)."""
        return 1 - self.bias

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest positive subnormal (-24 for FP16), as if subnormals were not flushed."""
        if self.lowest_subnormal_exponent is not None:
            return self.lowest_subnormal_exponent
        return self.min_normal_exponent - self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (15 for FP16)."""
        top_field = (1 << self.exponent_bits) - (2 if self.has_infinity else 1)
        return top_field - self.bias

    @property
    def max_significand(self) -> float:
        """Significand of the largest finite value, in [1, 2)."""
        return 2.0 - (1 + self.reserved_top_codes) * 2.0**-self.mantissa_bits

    @property
    def max_finite(self) -> float:
        """Largest finite value (65504 for FP16)."""
        return math.ldexp(self.max_significand, self.max_exponent)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value (2^-14 for FP16)."""
        return math.ldexp(1.0, self.min_normal_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value of the format (2^-24 for FP16; the smallest normal if subnormals are flushed)."""
        return math.ldexp(1.0, self.max_exponent + 1 - self.range_powers_of_two)

    @property
    def overflow_significand(self) -> float:
        """Significand of the overflow edge (exponent ``max_exponent``), half a step above the largest finite value."""
        return self.max_significand + 2.0 ** -(self.mantissa_bits + 1)

    @property
    def overflow_edge(self) -> float:
        """The value halfway between the largest finite value and the next step (65520 for FP16, 464 for E4M3)."""
        return math.ldexp(self.overflow_significand, self.max_exponent)

    @property
    def overflow_edge_overflows(self) -> bool:
        """Whether a value on the overflow edge overflows: ties go to the even code, the lower code only in E4M3."""
        return self.reserved_top_codes % 2 == 0

    @property
    def flush_edge(self) -> float:
        """Largest magnitude that is flushed to zero (2^-25 for FP16: this tie rounds to zero, which is even).

        If the format flushes subnormals, the smallest normal, which itself survives.
        """
        return math.ldexp(1.0, self.flush_exponent)

    @property
    def flush_exponent(self) -> int:
        """Exponent of ``flush_edge`` (-25 for FP16)."""
        return self.min_normal_exponent if self.flushes_subnormals else self.min_subnormal_exponent - 1

    @property
    def range_powers_of_two(self) -> int:
        """How many powers of two the format spans, subnormals included (40 for FP16)."""
        lowest = self.min_normal_exponent if self.flushes_subnormals else self.min_subnormal_exponent
        return self.max_exponent - lowest + 1

    def significant_bits(self, exponent: int) -> int:
        """Return how many significant bits a value of this exponent has.

        For FP16: 11 if normal, exponent + 25 if subnormal, 0 below the subnormals and above the format's range.
        """
        if exponent > self.max_exponent:
            return 0
        if exponent >= self.min_normal_exponent:
            return self.mantissa_bits + 1
        if self.flushes_subnormals:
            return 0
        return min(self.mantissa_bits + 1, max(0, exponent - self.min_subnormal_exponent + 1))

    def with_flushed_subnormals(self) -> FloatFormat:
        """Return the same format on hardware that flushes subnormals to zero."""
        return replace(self, name=f"{self.name}-ftz", flushes_subnormals=True)


FLOAT32 = FloatFormat("float32", exponent_bits=8, mantissa_bits=23)
#: Tensor Cores read FP32 storage and use 10 mantissa bits; the range, subnormals included, is FP32's.
TFLOAT32 = FloatFormat("tfloat32", exponent_bits=8, mantissa_bits=10, lowest_subnormal_exponent=-149)
BFLOAT16 = FloatFormat("bfloat16", exponent_bits=8, mantissa_bits=7)
FLOAT16 = FloatFormat("float16", exponent_bits=5, mantissa_bits=10)
FLOAT16_FTZ = FLOAT16.with_flushed_subnormals()
#: OCP FP8 "E4M3" (torch.float8_e4m3fn): no infinity, one NaN code, largest finite value 448.
FLOAT8_E4M3 = FloatFormat("float8_e4m3", exponent_bits=4, mantissa_bits=3, has_infinity=False, reserved_top_codes=1)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", exponent_bits=5, mantissa_bits=2)
#: OCP MX "E2M1": neither infinity nor NaN, largest value 6; larger values saturate.
FLOAT4_E2M1 = FloatFormat("float4_e2m1", exponent_bits=2, mantissa_bits=1, has_infinity=False)

#: Every format by its name; the one place to add another.
FORMATS: dict[str, FloatFormat] = {
    format.name: format
    for format in (FLOAT32, TFLOAT32, BFLOAT16, FLOAT16, FLOAT16_FTZ, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT4_E2M1)
}

#: Aliases that differ from a name above by more than spelling.
_OTHER_NAMES = {
    "half": "float16",
    "e4m3": "float8_e4m3",
    "e4m3fn": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1",
    "float4_e2m1fn": "float4_e2m1",
    "float4_e2m1fn_x2": "float4_e2m1",
}


def is_power_of_two(value: float) -> bool:
    """Return whether a value is 2^k for an integer k, so that scaling by it is exact within range."""
    return math.frexp(value)[0] == 0.5


def floor_log2(value: float) -> int:
    """Return the exponent floor(log2(value)) of a positive finite value, exactly."""
    return math.frexp(value)[1] - 1


def as_format(given: FormatLike) -> FloatFormat:
    """Return the FloatFormat with the given name; a FloatFormat is returned unchanged.

    Args:
        given: a FloatFormat; a name such as "float16", "fp16", "FP16", "half", "bf16", "tf32", "e4m3" or "fp8-e4m3";
            or a dtype of torch, NumPy, ml_dtypes or another framework.

    Raises:
        ValueError: the name is unknown; the message lists the known formats.
    """
    if isinstance(given, FloatFormat):
        return given
    name = _name(given)
    found = _BY_SPELLING.get(_spelling(name))
    # Two formats share this name: ml_dtypes' float8_e4m3, unlike OCP's, has infinities and a maximum of 240.
    if found is None or (name == "float8_e4m3" and not isinstance(given, str)):
        raise ValueError(
            f"{given!r} names no format: there are {', '.join(FORMATS)}, and short names such as fp16, bf16 and e4m3 (recipes "
            "of blocks, such as mxfp8 and nvfp4, are measured with recipes= or --recipes)"
        )
    return found


def _name(given: object) -> str:
    """Return a dtype's name: ``__name__`` of classes, ``name`` of NumPy and TensorFlow dtypes, ``str()`` of torch's."""
    if isinstance(given, str):
        return given
    names = (getattr(given, attribute, None) for attribute in ("__name__", "name"))
    return next((name for name in names if isinstance(name, str)), str(given))


def _spelling(name: str) -> str:
    """Return a key shared by all spellings of a name: "torch.float16", "FP16" and "f16"; "bf16" and "bfloat16"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower().rpartition(".")[2])
    return re.sub(r"^([bt]?)f(?:p|loat)?(?=\d)", r"\1float", plain)


_BY_SPELLING = {_spelling(name): format for name, format in FORMATS.items()} | {
    _spelling(name): FORMATS[meant] for name, meant in _OTHER_NAMES.items()
}
