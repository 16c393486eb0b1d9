"""The reference implementation of counting, in torch, for any device.

On a CPU, small tensors (such as biases) and float64 are counted in NumPy, large float32 tensors by ``binary32``, and other 16-bit
and 8-bit values by a histogram of codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import torch

from mpinspect.counting.arrays import count_values
from mpinspect.counting.binary32 import count_chunks
from mpinspect.counting.bits import (
    BINARY32,
    BINARY64,
    DEVICE_CHUNK,
    HOST_CHUNK,
    count_on_device,
    encoding_of,
    merge_rows,
    row_of,
    slots_of,
    widened,
)
from mpinspect.counting.layout import ZEROS, repeated
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
    if numel <= (_CODES_FROM if values.dtype.itemsize == 1 else HOST_CHUNK):
        pieces, times = flat_bits(values, HOST_CHUNK)
        return repeated(_count_in_numpy(pieces, values.dtype), times)
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
        return partial(_count_in_numpy, dtype=dtype)
    if dtype == torch.float32:
        return count_chunks
    return partial(count_codes, dtype=dtype)


def _count_in_numpy(pieces: Iterable[torch.Tensor], dtype: torch.dtype, divisor: float | None = None) -> torch.Tensor:
    """Return the row of CPU pieces, computing every value's slot from its bits; fastest for few values."""
    floating = np.float64 if dtype == torch.float64 else np.float32
    rows = [count_values(_encoded(piece, dtype).numpy().view(floating), divisor) for piece in pieces]
    return merge_rows([torch.from_numpy(row) for row in rows])


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
    if not isinstance(divisor, torch.Tensor) and not (divisor and math.isfinite(divisor)):
        raise ValueError(f"cannot divide by {divisor!r}: a loss scale is a finite number other than zero")
    if values.device.type == "cpu":
        pieces, times = flat_bits(values, HOST_CHUNK)
        return repeated(_count_in_numpy(pieces, values.dtype, abs(float(divisor))), times)
    if isinstance(divisor, torch.Tensor):
        by = divisor.detach().to(values.device, torch.float64).reshape(()).abs()
    else:
        # Torch multiplies a GPU's tensor by the reciprocal of a number, which rounds differently; by a tensor it divides.
        by = torch.full((), abs(float(divisor)), dtype=torch.float64, device=values.device)
    pieces, times = flat_bits(values, DEVICE_CHUNK)
    quotients = (_as_float64(piece, values.dtype) / by for piece in pieces)
    return repeated(merge_rows([count_on_device(each.view(torch.int64), BINARY64) for each in quotients]), times)


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
