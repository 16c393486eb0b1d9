"""The reference implementation of counting, in torch, for any device.

On a CPU, small float32 tensors (such as biases) are counted in NumPy, and 16-bit and 8-bit values by a histogram of codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import torch

from mpinspect.counting.binary32 import count_chunks
from mpinspect.counting.bits import (
    BINARY32,
    BINARY64,
    DEVICE_CHUNK,
    HOST_CHUNK,
    count_on_device,
    count_on_host,
    empty_row,
    encoding_of,
    float64_bits,
    merge_rows,
    minimum_bits,
    row_of,
    slots_of,
    widened,
)
from mpinspect.counting.layout import HEADER, INFS, MAX_BITS, MIN_BITS, NANS, NARROW, ZEROS, repeated
from mpinspect.counting.pieces import flat_bits, plain_values
from mpinspect.runtime.workers import POOL, single_threaded, threads_for

# One thread's chunk of a large tensor: 4 MiB of float32 input, and 4 MiB in each of two scratch buffers. Smaller chunks would
# fit a faster cache, but in a training step, which leaves the caches cold, the number of operations determines the time.
_CHUNK = 1 << 20
# Size of 8-bit tensors from which a histogram of the 256 codes is faster than computing every value's slot.
_CODES_FROM = 1 << 12
# Size from which using several threads is faster; in a training step torch's own threads still spin for some milliseconds.
_POOL_FROM = 1 << 22


@torch.no_grad()
def count(tensor: torch.Tensor, divisor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Count the exponents of a tensor's elements.

    The counts are exact integers computed from the bits of the values, whatever the tensor's dtype and any
    flush-denormals mode. The tensor is not changed, no graph is built, and no global setting is changed.

    Args:
        tensor: any shape and layout; float64, float32, float16, bfloat16, float8 or complex (both parts are counted).
        divisor: count x / divisor instead, divided in float64; used for a loss scale that is not a power of two (for a power
            of two, shift the histogram). A number, or a one-element tensor on the tensor's device. Its sign is ignored.

    Returns:
        int64 row on the tensor's device, see ``layout``: WIDE for float64, complex128 and with a divisor, else NARROW.
        On CUDA this does not wait for the device, unless the tensor is sparse and not coalesced. Tensors on Apple's GPUs
        are counted on the CPU, which waits.

    Raises:
        TypeError: an integer, boolean, quantized or nested tensor, or an object that is not a tensor.
        ValueError: a tensor on the meta device, or a divisor that is zero, infinite or NaN.
    """
    values, implicit_zeros = plain_values(tensor)
    if values.device.type == "mps":
        # Apple's GPUs have no float64, the format of the extremes.
        values = values.cpu()
    if divisor is not None:
        row = _count_divided(values, divisor)
    elif values.device.type == "cpu":
        row = _count_on_cpu(values)
    else:
        row = _count_on_device(values)
    if implicit_zeros:
        row[ZEROS] += implicit_zeros
    return row.to(tensor.device)


def _count_on_cpu(values: torch.Tensor) -> torch.Tensor:
    numel = values.numel()
    if 0 < numel <= SMALL and values.dtype == torch.float32 and values.is_contiguous():
        row = count_small(values)
        if row is not None:
            return row
    if numel <= (_CODES_FROM if values.dtype.itemsize == 1 else HOST_CHUNK):
        pieces, times = flat_bits(values, HOST_CHUNK)
        return repeated(_count_small(list(pieces), values.dtype), times)
    with single_threaded() as alone:
        threads, chunk = 1, HOST_CHUNK
        if alone:
            threads = threads_for(numel, _POOL_FROM)
            chunk = min(-(-numel // threads), _CHUNK)
        pieces, times = flat_bits(values, chunk)
        rows = POOL.map(_counter(values.dtype), list(pieces), threads)
        return repeated(merge_rows(rows), times)


def _counter(dtype: torch.dtype) -> Callable[[Iterable[torch.Tensor]], torch.Tensor]:
    if dtype == torch.float64:
        return partial(_count_small, dtype=dtype)
    if dtype == torch.float32:
        return count_chunks
    return partial(count_codes, dtype=dtype)


def _count_small(pieces: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the row of CPU pieces, computing every value's slot from its bits; fastest for few values."""
    encoding = encoding_of(dtype)
    rows = [empty_row(encoding, torch.device("cpu"))]
    for piece in pieces:
        for part in torch.split(piece, HOST_CHUNK):
            rows.append(count_on_host(_encoded(part, dtype), encoding))
    # The usual case is one piece, whose row needs no merging.
    return merge_rows(rows) if len(rows) > 2 else rows[-1]


def _count_on_device(values: torch.Tensor) -> torch.Tensor:
    """Return the row of a tensor on any other device; on CUDA this does not wait for the device."""
    encoding = encoding_of(values.dtype)
    pieces, times = flat_bits(values, DEVICE_CHUNK)
    rows = [count_on_device(_encoded(piece, values.dtype), encoding) for piece in pieces]
    return repeated(merge_rows(rows), times)


def _encoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes of a dtype as bits of ``encoding_of(dtype)``."""
    return codes if dtype in (torch.float32, torch.float64) else float32_bits(codes, dtype)


def _count_divided(values: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    if isinstance(divisor, torch.Tensor):
        by: float | torch.Tensor = divisor.detach().to(values.device, torch.float64).reshape(()).abs()
    else:
        by = abs(float(divisor))
        if by == 0 or not math.isfinite(by):
            raise ValueError(f"cannot divide by {divisor!r}: a loss scale is a finite number other than zero")
        if values.device.type != "cpu":
            # Torch multiplies a GPU's tensor by the reciprocal of a number, which rounds differently; by a tensor it divides.
            by = torch.full((), by, dtype=torch.float64, device=values.device)
    chunk, counter = HOST_CHUNK, count_on_host
    if values.device.type != "cpu":
        chunk, counter = DEVICE_CHUNK, count_on_device
    pieces, times = flat_bits(values, chunk)
    rows = []
    for piece in pieces:
        quotient = _as_float64(piece, values.dtype) / by
        rows.append(counter(quotient.view(torch.int64), BINARY64))
    return repeated(merge_rows(rows), times)


def _as_float64(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float64:
        return bits.view(torch.float64)
    return widened(_encoded(bits, dtype) & BINARY32.magnitude_mask)


_MAGNITUDES_16 = 0x7FFF


def count_codes(chunks: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the NARROW row of values of a 16-bit or 8-bit dtype, whose codes (int16, uint8) one-dimensional CPU chunks hold."""
    magnitudes, slots = _tables(dtype)
    counts = torch.zeros(len(slots), dtype=torch.int64, device="cpu")
    for chunk in chunks:
        codes = chunk & _MAGNITUDES_16 if chunk.dtype == torch.int16 else chunk
        counts += torch.bincount(codes, minlength=len(slots))
    by_slot = torch.zeros(BINARY32.slots, dtype=torch.int64, device="cpu").index_add_(0, slots, counts)
    present = magnitudes[(counts > 0) & (magnitudes > 0) & (magnitudes < BINARY32.infinity)]
    low, high = torch.aminmax(present) if len(present) else (BINARY32.infinity, 0)
    return row_of(by_slot, int(low), int(high), BINARY32)


@cache
def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each code's float32 magnitude bits, and each code's slot."""
    with torch.inference_mode(False):
        if dtype.itemsize == 1:
            codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        else:
            codes = torch.arange(_MAGNITUDES_16 + 1, dtype=torch.int16, device="cpu")
        magnitudes = float32_bits(codes, dtype) & BINARY32.magnitude_mask
        return magnitudes, slots_of(magnitudes, BINARY32).to(torch.int64)


def float32_bits(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits in float32, as int32, of a narrower dtype's codes (int16 or uint8), of any shape and on any device.

    float32 represents all values of the narrower dtypes.
    """
    if dtype == torch.bfloat16:
        # Shift the bits: a conversion may flush bfloat16's subnormals, which are subnormal in float32 too.
        return codes.to(torch.int32) << 16
    return codes.view(dtype).to(torch.float32).view(torch.int32)


#: The largest size for ``count_small``: up to this size most of the time is per-operation overhead.
SMALL = 1 << 12

_MASK = np.int32(BINARY32.magnitude_mask)
_MANTISSA_BITS = BINARY32.mantissa_bits
_NEAR = np.int32(1 << (_MANTISSA_BITS - 11))
# Keys: 0 for zero, then three per exponent field; the keys of the all-ones field are infinity and NaN.
_INF_KEY = 3 * 255
_KEYS = _INF_KEY + 3
# Index in a row of the first of the smallest normal exponent's three counters.
_FIRST_NORMAL = HEADER + 3 * (1 - BINARY32.bias - NARROW.lowest_exponent)


def count_small(values: torch.Tensor) -> torch.Tensor | None:
    """Return the NARROW row of a contiguous float32 CPU tensor with at least one element; None if it holds subnormals."""
    bits = values.detach().view(torch.int32).numpy().reshape(-1) & _MASK
    keys = bits >> _MANTISSA_BITS
    less = bits - np.int32(1)
    keys += less >> _MANTISSA_BITS
    # For the largest NaNs this sum overflows into the sign bit; an unsigned shift handles that correctly.
    keys += ((bits + _NEAR).view(np.uint32) >> _MANTISSA_BITS).view(np.int32)
    keys += 1
    counts = np.bincount(keys, minlength=_KEYS)
    if counts[1] or counts[2]:
        return None
    row = np.zeros(NARROW.length, dtype=np.int64)
    row[ZEROS], row[INFS], row[NANS] = counts[0], counts[_INF_KEY], counts[_INF_KEY + 1 :].sum()
    row[_FIRST_NORMAL:] = counts[3:_INF_KEY]
    # Zero minus one is the largest unsigned integer, so zeros do not affect the minimum.
    low = int(less.view(np.uint32).min()) + 1
    if counts[_INF_KEY:].any():
        bits = bits[bits < BINARY32.infinity]
    row[MIN_BITS] = minimum_bits(low, BINARY32)
    row[MAX_BITS] = float64_bits(int(bits.max(initial=0)), BINARY32)
    return torch.from_numpy(row)
