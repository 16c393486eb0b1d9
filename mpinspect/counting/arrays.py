"""Counts arrays of any other framework in NumPy, without torch. The counts equal those from the torch implementation.

float32 and float64 are counted by their bits, as ``bits`` explains: one key per element gives its exponent and both edge
counters. For narrow encodings the codes are counted, and each code's count is added to the counter of its value's key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpinspect.counting.encodings import NARROW_ENCODINGS, Binary, magnitudes
from mpinspect.counting.layout import HEADER, NARROW, NO_MINIMUM, WIDE, RowLayout, repeated

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

#: Elements per chunk, so that a chunk's temporaries stay in the second-level cache.
_CHUNK = 1 << 16
_WIDE_NAMES = ("float32", "float64", "complex64", "complex128")


@dataclass(frozen=True)
class _Binary(Binary):
    """binary32 or binary64 with NumPy's floating type, and the integer type of its bits."""

    floating: type[Any]
    integer: type[Any]


_BINARY32 = _Binary(23, 127, NARROW, np.float32, np.int32)
_BINARY64 = _Binary(52, 1023, WIDE, np.float64, np.int64)
_REBIAS = _BINARY64.bias - _BINARY32.bias


def count_array(array: AnyArray, divisor: float | None = None, dtype: str = "") -> IntArray:
    """Count the exponents of an array's elements exactly, like ``counting.count`` but in NumPy.

    The array is not changed, and copied only if its memory has gaps or its bytes are swapped. Broadcast elements are counted
    once and their counts multiplied.

    Args:
        array: any shape, strides and byte order; float16/32/64, complex (both parts are counted), or ml_dtypes' narrow floats.
        divisor: count x / divisor instead, divided in float64; its sign is ignored.
        dtype: name of the encoding (such as "bfloat16") if ``array`` holds bare codes as integers.

    Returns:
        int64 row, see ``layout``: WIDE for float64, complex128 and with a divisor, else NARROW.

    Raises:
        TypeError: a dtype without exponents, or a format that is not supported.
        ValueError: a divisor that is zero, infinite or NaN.
    """
    name = dtype or array.dtype.name
    if name not in NARROW_ENCODINGS and name not in _WIDE_NAMES:
        raise TypeError(
            f"an array of {name} has no exponents that can be counted: float16, float32, float64, complex, bfloat16 and the "
            "FP8, FP6 and FP4 formats of ml_dtypes have (convert it, or leave it out)"
        )
    by = None if divisor is None else _checked(divisor)
    flat, times = _flat(array)
    if name in NARROW_ENCODINGS:
        row = _count_codes(flat, name, by)
    else:
        native = flat.astype(flat.dtype.newbyteorder("="), copy=False)
        row = count_values(native.view(native.real.dtype), by)
    return repeated(row, times)


def _checked(divisor: float) -> float:
    by = abs(float(divisor))
    if by == 0 or not math.isfinite(by):
        raise ValueError(f"cannot divide by {divisor!r}: a loss scale is a finite number other than zero")
    return by


#: The slice of a dimension, by the sign of its stride, whose elements ascend in memory and do not repeat.
_ONCE = {-1: slice(None, None, -1), 0: slice(1), 1: slice(None)}


def _flat(array: AnyArray) -> tuple[AnyArray, int]:
    """Return the elements as a 1-d array in any order, and how often each occurs because of dimensions of stride 0."""
    if array.flags.c_contiguous or not array.size:
        return array.reshape(-1), 1
    times = math.prod(size for size, stride in zip(array.shape, array.strides, strict=True) if not stride)
    array = array[tuple(_ONCE[int(np.sign(stride))] for stride in array.strides)]
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return np.ascontiguousarray(array.transpose(order)).reshape(-1), times


# -- float32 and float64 ----------------------------------------------------------------------------------------------


def count_values(values: AnyArray, divisor: float | None = None) -> IntArray:
    """Return the row of float32 or float64 values, of shape (n,), divided in float64 if there is a divisor.

    The bits are counted, so a flush-denormals mode changes nothing.
    """
    binary = _BINARY64 if values.dtype == np.float64 or divisor is not None else _BINARY32
    counts = np.zeros(binary.slots, dtype=np.int64)
    low, high = binary.infinity, 0
    for chunk in _chunks(values):
        if divisor is not None:
            chunk = _divided(_widened(chunk), divisor)
        bits = chunk.view(binary.integer) & binary.integer(binary.magnitude_mask)
        counts += np.bincount(_keys(bits, binary), minlength=binary.slots)
        smallest, largest = _extremes(bits, binary)
        low, high = min(low, smallest), max(high, largest)
    return _row(counts, binary.float64_bits(low), binary.float64_bits(high), binary.layout)


def _divided(values: npt.NDArray[np.float64], divisor: float) -> npt.NDArray[np.float64]:
    with np.errstate(all="ignore"):
        return values / divisor


def _chunks(values: AnyArray) -> Iterator[AnyArray]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _keys(bits: AnyArray, binary: _Binary) -> AnyArray:
    """Return the key of each element: 0 for zero; power of two, other, near the top per exponent; then infinity, NaN.

    Args:
        bits: one-dimensional magnitude bits of type ``binary.integer``.
    """
    m, whole = binary.mantissa_bits, binary.integer
    extended = np.minimum(bits, whole(binary.infinity + 1))
    small = extended < whole(1 << m)
    if small.any():
        # Write subnormals as if the exponent field continued below zero; zeros end up far below the smallest subnormal.
        below = extended[small].astype(binary.floating).view(whole) - whole((binary.bias + m - 1) << m)
        extended[small] = below
    keys: AnyArray = extended >> m
    keys += (extended - whole(1)) >> m
    extended += whole(1 << (m - 11))
    keys += extended >> m
    keys += whole(3 * m - 1)
    np.maximum(keys, whole(0), out=keys)
    return keys


def _extremes(bits: AnyArray, binary: _Binary) -> tuple[int, int]:
    """Return magnitude bits of the smallest non-zero value (else infinity's) and of the largest finite value (else 0)."""
    # Zero minus one is the largest unsigned integer.
    low = int((bits - binary.integer(1)).view(f"u{bits.itemsize}").min()) + 1
    high = int(bits.max())
    if high >= binary.infinity:
        high = int(bits[bits < binary.infinity].max(initial=0))
    return min(low, binary.infinity), high


def _widened(values: AnyArray) -> npt.NDArray[np.float64]:
    """Return float64 magnitudes by integer arithmetic; a plain conversion flushes float32 subnormals in some modes."""
    if values.dtype == np.float64:
        return np.abs(values)
    bits = values.view(np.int32).astype(np.int64) & _BINARY32.magnitude_mask
    wide = np.where(bits < _BINARY32.infinity, (bits << 29) + (_REBIAS << 52), (bits << 29) | NO_MINIMUM)
    small = bits < (1 << 23)
    floats: npt.NDArray[np.float64] = wide.view(np.float64)
    floats[small] = bits[small] * 2.0**-149
    return floats


# -- narrow encodings ---------------------------------------------------------------------------------------------------


def _count_codes(flat: AnyArray, name: str, divisor: float | None) -> IntArray:
    unsigned = np.dtype(f"u{NARROW_ENCODINGS[name].item_size}")
    if flat.dtype.itemsize != unsigned.itemsize:
        raise TypeError(f"{flat.dtype} can't hold the codes of {name}, which take {unsigned.itemsize} bytes each")
    values = magnitudes(name)
    codes = flat.view(unsigned.newbyteorder(flat.dtype.byteorder))
    counts = np.zeros(len(values), dtype=np.int64)
    for chunk in _chunks(codes):
        counts += np.bincount(chunk, minlength=len(values))
    layout = NARROW
    if divisor is not None:
        values, layout = _divided(values, divisor), WIDE
    bits = values.view(np.int64)
    present = counts > 0
    by_key = np.zeros(_BINARY64.slots, dtype=np.int64)
    np.add.at(by_key, _keys(bits[present], _BINARY64), counts[present])
    finite = bits[present & (bits > 0) & (bits < NO_MINIMUM)]
    low, high = int(finite.min(initial=NO_MINIMUM)), int(finite.max(initial=0))
    return _row(by_key, low, high, layout)


def _row(counts: IntArray, low: int, high: int, layout: RowLayout) -> IntArray:
    """Return the row made of counts by key and the extremes.

    Args:
        counts: one count per key. For WIDE keys and a NARROW ``layout``, counts beyond NARROW's exponents are 0 and left out.
        low, high: float64 bits of the extremes.
    """
    row = np.zeros(layout.length, dtype=np.int64)
    row[:HEADER] = counts[0], counts[-2], counts[-1], low, high
    first = 1 if len(counts) == layout.length - 2 else 1 + 3 * (layout.lowest_exponent - WIDE.lowest_exponent)
    row[HEADER:] = counts[first : first + len(row) - HEADER]
    return row
