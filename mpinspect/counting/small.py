"""Counting a small float32 tensor on a CPU: biases and normalisation weights, of which a model has hundreds.

There the cost is that of calling operations at all, and in a training step, where each finds the processor's caches full of
other things, a call into torch costs several times one into NumPy. So a dozen NumPy operations do it.
"""

from __future__ import annotations

import numpy as np
import torch

from mpinspect.counting.bits import BINARY32, float64_bits
from mpinspect.counting.layout import HEADER, INFS, MAX_BITS, MIN_BITS, NANS, NARROW, NO_MINIMUM, ZEROS

#: Up to here the operations' own overhead is most of the time.
SMALL = 1 << 12

_MASK = np.int32(BINARY32.magnitude_mask)
_MANTISSA_BITS = BINARY32.mantissa_bits
_NEAR = np.int32(1 << (_MANTISSA_BITS - 11))
# Keys: 0 for zero, then three per exponent field, those of the all-ones field being infinity and NaN.
_INF_KEY = 3 * 255
_KEYS = _INF_KEY + 3
# Where the smallest normal exponent's three counters stand in a row.
_FIRST_NORMAL = HEADER + 3 * (1 - BINARY32.bias - NARROW.lowest_exponent)


def count_small(values: torch.Tensor) -> torch.Tensor | None:
    """The NARROW row of a contiguous float32 CPU tensor with at least one element; None if it holds subnormals."""
    bits = values.detach().view(torch.int32).numpy().reshape(-1) & _MASK
    keys = bits >> _MANTISSA_BITS
    less = bits - np.int32(1)
    keys += less >> _MANTISSA_BITS
    # Beyond the largest NaN this goes on into the sign bit, which an unsigned shift takes for what it is.
    keys += ((bits + _NEAR).view(np.uint32) >> _MANTISSA_BITS).view(np.int32)
    keys += 1
    counts = np.bincount(keys, minlength=_KEYS)
    if counts[1] or counts[2]:
        return None
    row = np.zeros(NARROW.length, dtype=np.int64)
    row[ZEROS], row[INFS], row[NANS] = counts[0], counts[_INF_KEY], counts[_INF_KEY + 1 :].sum()
    row[_FIRST_NORMAL:] = counts[3:_INF_KEY]
    # Zero minus one is the largest unsigned integer, so it never is the smallest.
    low = int(less.view(np.uint32).min()) + 1
    high = int((bits if not counts[_INF_KEY:].any() else bits[bits < BINARY32.infinity]).max(initial=0))
    row[MIN_BITS] = float64_bits(low, BINARY32) if low < BINARY32.infinity else NO_MINIMUM
    row[MAX_BITS] = float64_bits(high, BINARY32)
    return torch.from_numpy(row)
