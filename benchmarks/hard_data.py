"""Values that are easy or hard to count, to show the cost of unpredictable branches, contended counters and rare cases."""

from __future__ import annotations

import torch

DENSE, HALF_ZEROS, POWERS, WIDE, ZEROS, SUBNORMALS = (
    "dense",
    "half zeros",
    "powers of two",
    "log-uniform",
    "zeros",
    "subnormals",
)
KINDS = (DENSE, HALF_ZEROS, POWERS, WIDE, ZEROS, SUBNORMALS)

#: The number of values that are drawn and then repeated; too many for a branch predictor to learn.
_BLOCK = 1 << 22
#: The exponents of log-uniform data, the last excluded: 60 powers of two, or FP16's normal ones.
_SPAN = {torch.float16: (-14, 16)}
_WIDEST_SPAN = (-50, 10)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fresh(data: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of this kind in newly allocated and written memory, like a gradient's; shape (elements,)."""
    block = _block(data, min(elements, _BLOCK), dtype)
    values = torch.empty(elements, dtype=dtype)
    whole = elements // len(block)
    values[: whole * len(block)].view(whole, len(block)).copy_(block.expand(whole, -1))
    values[whole * len(block) :] = block[: elements - whole * len(block)]
    return values


def _block(data: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw values. ``dense``: normally distributed. ``log-uniform``: uniform exponents and uniform significands."""
    if data == ZEROS:
        return torch.zeros(elements, dtype=dtype)
    if data == SUBNORMALS:
        smallest_normal = torch.tensor(torch.finfo(dtype).tiny, dtype=dtype).view(_INTEGERS[dtype.itemsize]).item()
        return torch.randint(1, int(smallest_normal), (elements,), dtype=_INTEGERS[dtype.itemsize]).view(dtype)
    signs = torch.randint(0, 2, (elements,)) * 2.0 - 1.0
    low, high = _SPAN.get(dtype, _WIDEST_SPAN)
    if data == POWERS:
        return (signs * torch.exp2(torch.randint(low, high, (elements,)).double())).to(dtype)
    if data == WIDE:
        scales = torch.exp2(torch.randint(low, high, (elements,)).double())
        # Below 2 after rounding to the dtype, so that nothing leaves the span.
        return (signs * scales * (1 + 0.99 * torch.rand(elements))).to(dtype)
    values = torch.randn(elements).to(dtype)
    if data == HALF_ZEROS:
        values[torch.rand(elements) < 0.5] = 0
    return values
