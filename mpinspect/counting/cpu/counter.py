"""Counts CPU tensors into rows with the compiled loops of ``kernels``, on several threads for large tensors.

Importing compiles the loops, or reads them from numba's cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mpinspect.counting.bits import BINARY32, BINARY64, Encoding, empty_row, merge_rows
from mpinspect.counting.cpu import shares
from mpinspect.counting.layout import NARROW, repeated
from mpinspect.counting.pieces import fills_its_memory, flat_bits
from mpinspect.runtime.workers import NO_TEAM, POOL, TEAM

#: Values from which several threads are faster: torch's threads, mostly awake; our own, which must be woken.
_TEAM_FROM, _POOL_FROM = 1 << 16, 1 << 19
#: Values that one of our threads takes at a time: at least some 20 us of work.
_LEAST_CHUNK, _MOST_CHUNK = 1 << 15, 1 << 18
#: Chunks per thread; a thread whose core is busy takes fewer.
_CHUNKS_OF_A_THREAD = 4


@dataclass(frozen=True)
class _Way:
    """The name of the function that counts one dtype, and the encoding of its row."""

    work: str
    encoding: Encoding

    def row(self, values: torch.Tensor, threads: int = 1, team: tuple[int, int] = NO_TEAM) -> torch.Tensor:
        """Return the row of a tensor whose elements fill its memory without gaps."""
        row = torch.empty(self.encoding.layout.length, dtype=torch.int64, device="cpu")
        length = values.numel()
        work = shares.address_of(self.work)
        shares.fill_row(work, address(values), length, row.data_ptr(), len(row), threads, team)
        return row

    def row_of_pieces(self, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the row of all values in some tensors, counted by this thread."""
        return merge_rows(
            [self.row(piece.contiguous()) for piece in pieces] or [empty_row(self.encoding, torch.device("cpu"))]
        )


_WAYS = {
    torch.float32: _Way("count float32", BINARY32),
    torch.float64: _Way("count float64", BINARY64),
    torch.float16: _Way("count float16", BINARY32),
    torch.bfloat16: _Way("count bfloat16", BINARY32),
}

#: The address of a thread's work, by dtype. 8-bit dtypes have no loop: torch counts their few codes as fast.
WORK = {dtype: shares.address_of(way.work) for dtype, way in _WAYS.items()}
_NARROW_FLOATS = {getattr(torch, name): place for place, name in enumerate(shares.NARROW_FLOATS)}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def takes(tensor: torch.Tensor) -> bool:
    """Return whether ``fill`` and ``fill_many`` can count this tensor as it is, into a row of the layout NARROW."""
    return (
        tensor.dtype in WORK
        and tensor.dtype is not torch.float64
        and type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
    )


def fill(tensor: torch.Tensor, row: int) -> None:
    """Count a tensor that ``takes`` accepts into the row at an address."""
    length = tensor.numel()
    threads, team = threads_for(length)
    shares.fill_row(WORK[tensor.dtype], address(tensor), length, row, NARROW.length, threads, team)


def fill_many(pairs: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Count many tensors that ``takes`` accepts into the rows at their addresses, in one compiled call."""
    entries = [
        (WORK[tensor.dtype], address(tensor), tensor.numel(), row, _NARROW_FLOATS[tensor.dtype])
        for tensor, row in pairs
    ]
    shares.fill_rows(np.array(entries, np.int64), NARROW.length, *threads_for(_TEAM_FROM), _TEAM_FROM)


def threads_for(length: int) -> tuple[int, tuple[int, int]]:
    """Return the number of threads for this many values, and the addresses of their team."""
    if length >= _TEAM_FROM and TEAM.there and (threads := torch.get_num_threads()) > 1:
        return threads, TEAM.addresses
    return 1, NO_TEAM


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first value. Raises ValueError if the tensor has values but no memory."""
    found = tensor.data_ptr()
    if not found and tensor.numel():
        raise ValueError(
            "the tensor's memory has been freed, as sharded training does between uses: there is nothing to count"
        )
    return found


def count(values: torch.Tensor) -> torch.Tensor:
    """Return the row of a strided CPU tensor of a dtype in WORK, any shape and strides."""
    if values._is_zerotensor():
        # It has no memory.
        values = torch.zeros_like(values)
    way = _WAYS[values.dtype]
    threads, length = torch.get_num_threads(), values.numel()
    if (length < _TEAM_FROM or threads == 1 or TEAM.there) and (values.is_contiguous() or fills_its_memory(values)):
        return way.row(values, *threads_for(length))
    pieces, times = flat_bits(values, _chunk(length, threads))
    if length < _POOL_FROM:
        threads = 1
    return repeated(merge_rows(POOL.map(way.row_of_pieces, list(pieces), threads)), times)


def _chunk(values: int, threads: int) -> int:
    return min(max(_LEAST_CHUNK, -(-values // (_CHUNKS_OF_A_THREAD * threads))), _MOST_CHUNK)
