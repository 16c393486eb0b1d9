"""Computes the largest magnitude of a CPU tensor, which the non-finite watch needs for every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mpinspect.counting.cpu import available
from mpinspect.counting.pieces import fills_its_memory
from mpinspect.runtime.workers import POOL, TEAM, single_threaded, threads_for

if TYPE_CHECKING:
    from mpinspect.counting.cpu.largest import Largest

#: Sizes from which using several threads is faster: torch's threads (mostly awake), our own pool (which must be woken); and the
#: number of values in a piece for one thread of the pool.
_TEAM_FROM, _POOL_FROM, _PIECE = 1 << 17, 1 << 20, 1 << 18
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def largest_magnitude(tensor: torch.Tensor) -> float | None:
    """Return the largest |x| of a CPU tensor: NaN if any element is NaN, else infinity if any is infinite.

    Args:
        tensor: a tensor of float64, float32, float16 or bfloat16, of any shape, dense in any order of dimensions.

    Returns:
        None for an empty tensor, another device, dtype or layout, a subclass of Tensor, or without compiled loops (yet);
        callers then use ``torch.aminmax``.
    """
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    loops = available.loops()
    if loops is None:
        return None
    largest: Largest | None = loops.largest.LARGEST.get(tensor.dtype)
    if largest is None or not (tensor.is_contiguous() or fills_its_memory(tensor)):
        return None
    address, length = tensor.data_ptr(), tensor.numel()
    if not address or not length:
        # The tensor's memory has been freed, as in sharded training between uses, or the tensor is empty.
        return None
    threads = threads_for(length, _TEAM_FROM)
    if threads > 1:
        if TEAM.there:
            return largest.of(address, length, threads, TEAM.addresses)
        if length >= _POOL_FROM:
            return _in_pieces(largest, address, length, tensor.element_size())
    return largest.of(address, length)


def _in_pieces(largest: Largest, address: int, length: int, itemsize: int) -> float:
    def work(starts: Iterable[int]) -> float:
        return _largest([largest.of(address + start * itemsize, min(_PIECE, length - start)) for start in starts])

    with single_threaded():
        return _largest(POOL.map(work, range(0, length, _PIECE), torch.get_num_threads()))


def _largest(found: list[float]) -> float:
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
