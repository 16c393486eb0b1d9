"""What can be told of a tensor from its shape, strides and dtype alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mpinspect.shapes.operators.call import NotToldError
from mpinspect.shapes.records import ITEM_SIZES, Operand


def item_size(dtype: str) -> int:
    """Bytes of one element. Names that the table lacks tell their bits themselves ("uint16", "quint8")."""
    known = ITEM_SIZES.get(dtype)
    if known is not None:
        return known
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


def memory(operand: Operand | None) -> int:
    """Bytes of the elements that are stored: what was expanded (stride 0) counts once."""
    if operand is None:
        return 0
    sizes = operand.shape
    if operand.strides is not None:
        sizes = tuple(size for size, stride in zip(operand.shape, operand.strides, strict=False) if stride or not size)
    return math.prod(sizes) * item_size(operand.dtype)


def traffic(*operands: Operand | None) -> int:
    """Least memory traffic: every operand read or written once."""
    return sum(memory(operand) for operand in operands)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch writes them: an empty dimension counts as 1."""
    strides = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        strides[place] = strides[place + 1] * max(shape[place + 1], 1)
    return tuple(strides)


def fresh(shape: Sequence[int], dtype: str) -> Operand:
    """A result that torch allocates itself: row-major, at the start of its storage."""
    return Operand(tuple(shape), contiguous(shape), dtype)


def transposed(operand: Operand) -> Operand:
    """The last two dimensions exchanged; the memory stays."""
    shape, strides = operand.shape, operand.strides
    return Operand(
        (*shape[:-2], shape[-1], shape[-2]),
        None if strides is None else (*strides[:-2], strides[-1], strides[-2]),
        operand.dtype,
        operand.offset,
    )


def column(operand: Operand) -> Operand:
    """A vector as a matrix of one column."""
    return _with(operand, (*operand.shape, 1), None if operand.strides is None else (*operand.strides, 1))


def row(operand: Operand) -> Operand:
    """A vector as a matrix of one row."""
    strides = None if operand.strides is None else (operand.shape[0] * operand.strides[0], *operand.strides)
    return _with(operand, (1, *operand.shape), strides)


def folded(operand: Operand, kept: int = 1) -> Operand:
    """All dimensions but the last ``kept`` made into one, as torch.reshape would: a view if the strides allow it, else a copy.

    Raises:
        NotToldError: it has fewer dimensions than that.
    """
    cut = len(operand.shape) - kept
    if cut < 0:
        raise NotToldError
    lead, rest = operand.shape[:cut], operand.shape[cut:]
    shape = (math.prod(lead), *rest)
    if operand.strides is None or 0 in shape:
        return _with(operand, shape, None if operand.strides is None else contiguous(shape))
    stride = _merged(lead, operand.strides[:cut])
    if stride is None:
        return Operand(shape, contiguous(shape), operand.dtype)
    # A single row: no stride leads to a next one, so torch's view takes that of contiguous memory.
    lone = shape[1] if len(shape) > 1 else 1
    return _with(operand, shape, (stride or lone, *operand.strides[cut:]))


def expanded(operand: Operand, batch: Sequence[int]) -> Operand:
    """Broadcast to other leading dimensions, those before the last two."""
    missing = len(batch) + 2 - len(operand.shape)
    shape = (*batch, *operand.shape[-2:])
    if operand.strides is None:
        return _with(operand, shape, None)
    old = zip(operand.shape[:-2], operand.strides[:-2], strict=False)
    kept = [
        0 if size == 1 and wanted != 1 else stride for (size, stride), wanted in zip(old, batch[missing:], strict=False)
    ]
    return _with(operand, shape, (*[0] * missing, *kept, *operand.strides[-2:]))


def is_channels_last(operand: Operand) -> bool | None:
    """Whether an image tensor is stored NHWC or NDHWC; None where strides are unknown or both layouts are the same."""
    strides = operand.strides
    if strides is None or len(operand.shape) < 3 or len(strides) != len(operand.shape):
        return None
    last = channels_last(operand.shape)
    if all(a == b or size <= 1 for size, a, b in zip(operand.shape, strides, last, strict=True)):
        row_major = contiguous(operand.shape)
        same = all(a == b or size <= 1 for size, a, b in zip(operand.shape, strides, row_major, strict=True))
        return None if same else True
    return strides[1] == 1 and operand.shape[1] > 1


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor (batch, channels, *positions) that is stored (batch, *positions, channels)."""
    stored = contiguous((shape[0], *shape[2:], shape[1]))
    return (stored[0], stored[-1], *stored[1:-1])


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of dimensions made into one; 0 where they have one element in all; None where no stride fits."""
    merged, wanted = 0, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if merged == 0 and wanted == 0:
            merged = stride
        elif stride != wanted:
            return None
        wanted = stride * size
    return merged


def _with(operand: Operand, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Operand:
    return Operand(shape, strides, operand.dtype, operand.offset)
