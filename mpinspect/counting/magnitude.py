"""The largest magnitude of a CPU tensor, at once: what the non-finite watch asks of every tensor it sees."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mpinspect.counting.cpu import available
from mpinspect.counting.pieces import fills_its_memory
from mpinspect.runtime.workers import POOL, TEAM, single_threaded

if TYPE_CHECKING:
    from mpinspect.counting.cpu.largest import Largest

#: From where on sharing pays: torch's threads mostly are awake, ours have to be woken. Values in a piece for one of ours.
_TEAM_FROM, _POOL_FROM, _PIECE = 1 << 17, 1 << 20, 1 << 18
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def largest_magnitude(tensor: torch.Tensor) -> float | None:
    """Return the largest |x| of a CPU tensor; infinity if one is infinite and NaN if one is.

    Args:
        tensor: not empty; float64, float32, float16 or bfloat16, any shape and order of its dimensions in memory, without gaps.

    Returns:
        None where this way does not apply: another device, dtype or layout, a subclass of Tensor, or no compiled loops (yet).
        ``torch.aminmax`` answers then.
    """
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    loops = available.loops()
    largest: Largest | None = None if loops is None else loops.largest.LARGEST.get(tensor.dtype)
    if largest is None or not (tensor.is_contiguous() or fills_its_memory(tensor)):
        return None
    address, length = tensor.data_ptr(), tensor.numel()
    if not address:
        # Its memory was given back, as sharded training does between uses.
        return None
    threads = torch.get_num_threads() if length >= _TEAM_FROM else 1
    if threads > 1:
        if TEAM.there:
            return largest.of(address, length, threads, TEAM.addresses)
        if length >= _POOL_FROM:
            return _in_pieces(largest, address, length, tensor.element_size())
    return largest.of(address, length)


def _in_pieces(largest: Largest, address: int, length: int, itemsize: int) -> float:
    def work(starts: Iterable[int]) -> float:
        found = [largest.of(address + start * itemsize, min(_PIECE, length - start)) for start in starts]
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

    with single_threaded():
        found = POOL.map(work, range(0, length, _PIECE), torch.get_num_threads())
    return math.nan if any(map(math.isnan, found)) else max(found)
