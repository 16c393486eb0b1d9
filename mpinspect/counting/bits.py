"""Exact counting by integer arithmetic on the bits of float32 or float64 values, on any device.

Let e be the magnitude bits of a value (exponent field and mantissa as one integer). Then

    (e >> m) + ((e - 1) >> m) + ((e + near) >> m)        m mantissa bits, near = 2^(m - 11)

is 3 field - 1 for a power of two, 3 field + 1 for a significand of at least 2 - 2^-11, and 3 field otherwise: this one number
determines the exponent and both edge counters. Subnormals are first written as if the exponent field continued below
zero, by converting their mantissa, an integer, to a float. No arithmetic uses the value itself, so neither the precision
of its dtype nor a flush-denormals mode can change a count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpinspect.counting.encodings import Binary
from mpinspect.counting.layout import MAX_BITS, MIN_BITS, NARROW, NO_MINIMUM, WIDE

#: Elements per chunk if torch may use several threads: fewer than 32768, from which torch splits an operation over threads.
#: Here such a split costs more than it gains, and it stalls for milliseconds if other processes are busy.
HOST_CHUNK = 32512
#: Elements per chunk on a GPU: with about 28 bytes of temporaries each, some 120 MB, yet few kernel launches.
DEVICE_CHUNK = 1 << 22

# The number of histogram copies that a GPU's threads use in turn, because most values share a few bins and atomic
# additions to one address are serialised.
_COPIES = 32


@dataclass(frozen=True)
class Encoding(Binary):
    """A binary encoding with its torch dtypes.

    Args:
        dtype, int_dtype: the floating dtype and the integer dtype of its bits.
    """

    dtype: torch.dtype
    int_dtype: torch.dtype


BINARY32 = Encoding(23, 127, NARROW, torch.float32, torch.int32)
BINARY64 = Encoding(52, 1023, WIDE, torch.float64, torch.int64)
_REBIAS = BINARY64.bias - BINARY32.bias


def slots_of(magnitude: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Return each value's slot: 0 for zero; power of two, other, near the top per exponent; then infinity, NaN.

    Args:
        magnitude: magnitude bits of dtype ``encoding.int_dtype``, any shape.

    Returns:
        Slots of the same shape and dtype, 0 .. ``encoding.slots`` - 1.
    """
    m = encoding.mantissa_bits
    bits = magnitude.clamp_max(encoding.infinity + 1)
    below_zero = (encoding.bias + m - 1) << m
    subnormal = bits.to(encoding.dtype).view(encoding.int_dtype).sub_(below_zero)
    extended = torch.where(bits < encoding.min_normal, subnormal, bits)
    slots = extended >> m
    slots += (extended - 1) >> m
    slots += extended.add_(1 << (m - 11)) >> m
    # The smallest subnormal, a power of two with field 1 - m, gets slot 1; zero is far below it and is clamped to 0.
    return slots.add_(3 * m - 1).clamp_min_(0)


def extremes_on_host(
    magnitude: torch.Tensor, encoding: Encoding, scratch: torch.Tensor | None = None
) -> tuple[int, int]:
    """Return the bits of the smallest non-zero magnitude, and of the largest finite magnitude.

    Args:
        magnitude: a non-empty CPU tensor of magnitude bits.
        scratch: tensor of the same shape and dtype to overwrite.

    Returns:
        The smallest is infinity's bits or more, and the largest 0, if no such value exists.
    """
    low, high = (int(end) for end in torch.aminmax(magnitude))
    if high >= encoding.infinity:
        # The sign bit of (bits - infinity), extended to a mask, selects the finite values and clears the others.
        below = torch.sub(magnitude, encoding.infinity, out=scratch)
        high = int((below.bitwise_right_shift_(8 * below.itemsize - 1).bitwise_and_(magnitude)).amax())
    if low == 0:
        # Zero minus one has every bit set; without the sign bit it is the largest integer, above every other value.
        less = torch.sub(magnitude, 1, out=scratch)
        low = int(less.bitwise_and_(encoding.magnitude_mask).amin()) + 1
    return low, high


def row_of(counts: torch.Tensor, low: int, high: int, encoding: Encoding) -> torch.Tensor:
    """Return the row, on the CPU, made of counts and extremes.

    Args:
        counts: int64, shape (encoding.slots,).
        low, high: results of ``extremes_on_host``.
    """
    ends = torch.tensor((encoding.float64_bits(low), encoding.float64_bits(high)), dtype=torch.int64, device="cpu")
    return torch.cat((counts[:1], counts[-2:], ends, counts[1:-2]))


def encoding_of(dtype: torch.dtype) -> Encoding:
    """Return the encoding whose row holds values of this dtype."""
    return BINARY64 if dtype == torch.float64 else BINARY32


def count_on_device(bits: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Return the row of a one-dimensional tensor of bits on the tensor's device, without host synchronisation."""
    rows = []
    if not bits.numel():
        return empty_row(encoding, bits.device)
    for part in torch.split(bits, DEVICE_CHUNK):
        magnitude = part & encoding.magnitude_mask
        counts = histogram_on_device(slots_of(magnitude, encoding), encoding.slots)
        ends = _extremes_on_device(magnitude, encoding)
        rows.append(torch.cat((counts[:1], counts[-2:], ends, counts[1:-2])))
    return merge_rows(rows)


def empty_row(encoding: Encoding, device: torch.device) -> torch.Tensor:
    """Return the row of an empty tensor."""
    row = torch.zeros(encoding.layout.length, dtype=torch.int64, device=device)
    row[MIN_BITS].fill_(NO_MINIMUM)
    return row


def histogram_on_device(slots: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``torch.bincount(slots, minlength=length)`` without bincount's synchronisation with the GPU."""
    copies = torch.zeros(_COPIES * length, dtype=torch.int64, device=slots.device)
    copy = torch.arange(slots.numel(), device=slots.device, dtype=torch.int64) % _COPIES
    one = torch.ones(1, dtype=torch.int64, device=slots.device)
    copies.scatter_add_(0, copy.mul_(length).add_(slots), one.expand(slots.numel()))
    return copies.view(_COPIES, length).sum(0)


def _extremes_on_device(magnitude: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Return MIN_BITS and MAX_BITS as an int64 tensor of shape (2,), without host synchronisation."""
    below_low = ((magnitude - 1) & encoding.magnitude_mask).amin()
    high = magnitude.masked_fill(magnitude >= encoding.infinity, 0).amax()
    none = below_low >= encoding.infinity - 1
    # One is added back only where this cannot overflow.
    ends = torch.stack((torch.where(none, below_low, below_low + 1), high)).to(torch.int64)
    if encoding is BINARY32:
        ends = widened(ends).view(torch.int64)
    return torch.stack((ends[0].masked_fill(none, NO_MINIMUM), ends[1]))


def widened(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the exact float64 values of float32 magnitude bits; a plain conversion flushes subnormals in some modes.

    Args:
        magnitude: integers without the sign bit, any shape.

    Returns:
        float64, same shape.
    """
    bits = magnitude.to(torch.int64)
    normal = ((bits << 29) + (_REBIAS << 52)).view(torch.float64)
    small = torch.where(bits < BINARY32.min_normal, bits.to(torch.float64) * 2.0**-149, normal)
    # Infinity and NaN retain their all-ones exponent field.
    special = ((bits << 29) | NO_MINIMUM).view(torch.float64)
    return torch.where(bits < BINARY32.infinity, small, special)


def merge_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """Merge rows of one layout on one device: add counts, take minimum and maximum of extremes. No host synchronisation."""
    if len(rows) == 1:
        return rows[0]
    stacked = torch.stack(rows)
    merged = stacked.sum(0)
    merged[MIN_BITS] = stacked[:, MIN_BITS].amin()
    merged[MAX_BITS] = stacked[:, MAX_BITS].amax()
    return merged
