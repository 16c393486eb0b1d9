"""Counts one array: makes its unscaled window of one sample, and the largest magnitude for the non-finite watch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpinspect.counting import layout
from mpinspect.counting.arrays import count_array
from mpinspect.counting.foreign import on_host
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import floor_log2, is_power_of_two
from mpinspect.ranges.capture.arrays.given import Given
from mpinspect.ranges.kinds import GRADIENT_KINDS
from mpinspect.ranges.windows.tensors import TensorKey, TensorWindow, floor_exponent, narrowest, overflow_exponent

IntArray = npt.NDArray[np.int64]

#: The format of each narrow dtype; for a dtype without a known format, the closest one that flushes at least as many values.
_FORMAT_OF = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "float8_e4m3fnuz": "float8_e4m3",
    "float8_e4m3b11fnuz": "float8_e4m3",
    "float8_e3m4": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2",
    "float6_e2m3fn": "float4_e2m1",
    "float6_e3m2fn": "float4_e2m1",
    "float4_e2m1fn": "float4_e2m1",
}


@dataclass(frozen=True)
class ArraySample:
    """The counts of one array.

    Args:
        key: the tensor's key.
        window: the unscaled counts, as one sample.
        peak: the unscaled peak exponent; None without a finite non-zero value.
        largest: the largest magnitude, still scaled; inf or NaN if the array contains one.
        scale: the loss scale, as in Given.
        shape, dtype: shape and dtype of the whole array.
    """

    key: TensorKey
    window: TensorWindow
    peak: int | None
    largest: float
    scale: float | None
    shape: tuple[int, ...]
    dtype: str


def sample(key: TensorKey, array: Any, given: Given) -> ArraySample:
    """Count an array and return its sample; waits for the device that holds it.

    Raises:
        TypeError: the value is not an array, or its dtype has no exponents.
    """
    shift, divisor = 0, given.scale
    if given.scale is not None and is_power_of_two(given.scale):
        # Unscaling only shifts the exponents.
        shift, divisor = floor_log2(given.scale), None
    row, shape, dtype = _counted(array, divisor)
    counts = layout.decode(row)
    narrow = narrowest((given.passed_through, _FORMAT_OF.get(dtype, "float32")))
    histogram = counts.shifted(-shift)
    peak = _peak(key, histogram, narrow, given.scale)
    window = TensorWindow(
        histogram,
        samples=1,
        peaks={} if peak is None else {peak: 1},
        dtypes=(dtype,),
        passed_through=narrow,
        floor_exponent=floor_exponent(narrow, given.scale),
        numel_max=counts.total,
    )
    return ArraySample(key, window, peak, _largest(counts, divisor or 1.0), given.scale, shape, dtype)


def _counted(array: Any, divisor: float | None) -> tuple[IntArray, tuple[int, ...], str]:
    """Return an array's row of counts, shape and dtype; torch tensors are counted on their device."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from mpinspect.counting.fastest import count

        row: IntArray = count(array, divisor).cpu().numpy()
        return row, tuple(array.shape), str(array.dtype).removeprefix("torch.")
    host = on_host(array)
    row = count_array(host.values, divisor, dtype=host.encoding)
    # Real and imaginary parts are counted separately.
    row[layout.ZEROS] += host.implicit_zeros * (2 if host.values.dtype.kind == "c" else 1)
    return row, host.shape, host.dtype


def _peak(key: TensorKey, histogram: ExponentHistogram, narrow: str, scale: float | None) -> int | None:
    """Return the exponent of the largest magnitude, rounded to 11 bits.

    A gradient with infinities gets at least the smallest exponent that overflows.
    """
    peak = histogram.peak_exponent if len(histogram.counts) else None
    if histogram.infs and narrow != "float32" and key.kind in GRADIENT_KINDS:
        least = overflow_exponent(narrow, scale)
        return least if peak is None else max(peak, least)
    return peak


def _largest(counts: ExponentHistogram, divisor: float) -> float:
    if counts.nans:
        return math.nan
    if counts.infs:
        return math.inf
    return counts.max_abs * divisor
