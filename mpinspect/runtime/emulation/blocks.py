"""Multiplies 16-bit matrices in FP32, in parts that fit a core's cache.

An FP32 copy of a whole large operand or result would be written to memory and read back only once. A part's copy never
leaves the cache, so time and memory are close to the 16-bit tensors' own. As in counting, each thread processes
separate parts: splitting every operation on a part over all threads would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from mpinspect.runtime.workers import POOL, single_threaded

#: FP32 values in a part, 1 MiB: it and its 16-bit twin stay in a core's second-level cache.
PART = 2**18
#: With more threads than this, torch splits each part among its threads: the GIL would slow threads of our own.
MOST_THREADS = 8

Item = TypeVar("Item")


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b``, plus ``bias`` of shape (n,), summed in FP32 and rounded once.

    The result is bitwise reproducible as long as ``torch.get_num_threads()`` is the same.

    Args:
        a: FP16 or BF16, shape (m, k), with any strides.
        b: the same dtype, shape (k, n).
        bias: the same dtype, shape (n,).

    Returns:
        The same dtype, shape (m, n), contiguous.
    """
    (m, _), n = a.shape, b.shape[1]
    largest = max(a.numel(), b.numel(), m * n)
    if bias is not None:
        bias = bias.float()
    if largest <= 4 * PART:
        return _sum(a.float(), b.float(), bias).to(a.dtype)
    result = a.new_empty(m, n)
    small = m * n * torch.get_num_threads() <= largest // 2
    if small and not _by_rows(a if a.numel() == largest else b.t()):
        _inner(a, b, bias, result)
    elif b.numel() == largest and m * n < largest:
        _rows(b.t(), a.t(), bias if bias is None else bias[:, None], result.t())
    else:
        _rows(a, b, bias, result)
    return result


def _rows(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    """Compute in parts of rows of ``a`` and the result; ``bias`` has shape (n,), per column, or (m, 1), per row."""
    right = b.float()

    def work(parts: Iterable[slice]) -> None:
        for rows in parts:
            part = bias
            if part is not None and part.dim() == 2:
                part = part[rows]
            result[rows] = _sum(a[rows].float(), right, part)

    _share(work, _parts(a.shape[0], max(a.shape[1], b.shape[1])))


def _inner(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    """Compute in parts of the summed dimension, added up in FP32, in an order that does not depend on thread timing."""
    parts, sums = _parts(a.shape[1], max(a.shape[0], b.shape[1])), torch.get_num_threads()
    totals = torch.zeros(sums, *result.shape, dtype=torch.float32, device=result.device)

    def work(places: Iterable[int]) -> None:
        for place in places:
            for inner in parts[place::sums]:
                totals[place].addmm_(a[:, inner].float(), b[inner].float())

    _share(work, range(sums))
    total = totals.sum(0)
    if bias is not None:
        total.add_(bias)
    result.copy_(total)


def _share(work: Callable[[Iterable[Item]], None], items: Sequence[Item]) -> None:
    """Process the items in our own threads, or in this thread, where torch splits each item among its threads."""

    inferring = torch.is_inference_mode_enabled()

    def in_our_state(taken: Iterable[Item]) -> None:
        # A worker thread starts with gradients enabled, and outside inference mode.
        with torch.inference_mode(inferring), torch.no_grad():
            work(taken)

    threads = torch.get_num_threads()
    if threads <= MOST_THREADS:
        with single_threaded() as alone:
            if alone:
                POOL.map(in_our_state, items, threads)
                return
    in_our_state(items)


def _sum(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _parts(length: int, width: int) -> list[slice]:
    """Return slices of ``range(length)``: each is the work of one thread or, with many threads, of all of torch's together."""
    threads = torch.get_num_threads()
    if threads <= MOST_THREADS:
        threads = 1
    step = max(1, PART * threads // width)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _by_rows(matrix: torch.Tensor) -> bool:
    """Return whether the rows, not the columns, are contiguous in memory."""
    return matrix.stride(0) >= matrix.stride(1)
