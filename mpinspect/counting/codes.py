"""Counting 16-bit and 8-bit dtypes on a CPU: count the codes, then fold each code's count into its exponent's.

Two numbers of the same magnitude differ in the sign bit, which is cut from 16-bit codes. All 256 codes of an 8-bit
dtype are kept: in the "fnuz" ones the code of a negative zero means NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from mpinspect.counting.bits import BINARY32, row_of, slots_of

_MAGNITUDES_16 = 0x7FFF


def count_codes(chunks: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The NARROW row of values of a 16-bit or 8-bit floating dtype.

    Args:
        chunks: one-dimensional tensors on the CPU, the values' codes as int16 or uint8.
        dtype: what the codes mean.
    """
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
    """Of every code: its value's float32 magnitude bits, and its slot."""
    with torch.inference_mode(False):
        if dtype.itemsize == 1:
            codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        else:
            codes = torch.arange(_MAGNITUDES_16 + 1, dtype=torch.int16, device="cpu")
        magnitudes = float32_bits(codes, dtype) & BINARY32.magnitude_mask
        return magnitudes, slots_of(magnitudes, BINARY32).to(torch.int64)


def float32_bits(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 bits of the same values in float32, which holds every value of the narrower dtypes.

    Args:
        codes: int16 or uint8, any shape, any device.
        dtype: what the codes mean.
    """
    if dtype == torch.bfloat16:
        # By bits: a conversion may flush bfloat16's subnormals, which are float32's too.
        return codes.to(torch.int32) << 16
    return codes.view(dtype).to(torch.float32).view(torch.int32)
