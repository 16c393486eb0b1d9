"""Products of 16-bit matrices in FP32, in parts that fit a core's cache.

An FP32 copy of a large operand or result is written to memory and read back once for no use but its rounding. In parts it
never leaves the cache: time and memory are near what the 16-bit tensors take.
"""

from __future__ import annotations

import torch

#: FP32 values in a part, 8 MiB: small enough for the cache, large enough that starting the threads costs nothing beside it.
PART = 2**21


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b``, plus ``bias`` of shape (n,): summed in FP32, rounded once.

    Args:
        a: FP16 or BF16, shape (m, k), strided in any way.
        b: the same dtype, shape (k, n).
        bias: the same dtype, shape (n,), or broadcast to it.

    Returns:
        The same dtype, shape (m, n), contiguous.
    """
    (m, _), n = a.shape, b.shape[1]
    largest = max(a.numel(), b.numel(), m * n)
    if largest <= 2 * PART:
        return _sum(a.float(), b.float(), bias).to(a.dtype)
    result = a.new_empty(m, n)
    if m * n == largest or (a.numel() == largest and _by_rows(a)):
        _rows(a, b, bias, result)
    elif a.numel() < largest and not _by_rows(b):
        _rows(b.t(), a.t(), None if bias is None else bias[:, None], result.t())
    else:
        _inner(a, b, bias, result)
    return result


def _rows(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    """Parts of rows of ``a`` and of the result. ``bias`` belongs to the columns, shape (n,), or the rows, shape (m, 1)."""
    right = b.float()
    for rows in _parts(a.shape[0], max(a.shape[1], b.shape[1])):
        part = bias if bias is None or bias.dim() == 1 else bias[rows]
        result[rows] = _sum(a[rows].float(), right, part)


def _inner(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    """Parts of the dimension that is summed over, added up in FP32."""
    total = torch.zeros(result.shape, dtype=torch.float32) if bias is None else bias.float().expand_as(result).clone()
    for inner in _parts(a.shape[1], max(a.shape[0], b.shape[1])):
        total.addmm_(a[:, inner].float(), b[inner].float())
    result.copy_(total)


def _sum(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias.float(), a, b)


def _parts(length: int, width: int) -> list[slice]:
    step = max(1, PART // width)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _by_rows(matrix: torch.Tensor) -> bool:
    """Rows, not columns, lie together in memory."""
    return matrix.stride(0) >= matrix.stride(1)
