"""From a CPU tensor to its row of counts with the compiled loops of ``kernels``, on a few threads where that pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mpinspect.counting.bits import BINARY32, BINARY64, Encoding, merge_rows
from mpinspect.counting.cpu import shares
from mpinspect.counting.layout import HEADER, MIN_BITS
from mpinspect.counting.pieces import fills_its_memory, flat_bits
from mpinspect.workers import NO_TEAM, POOL, TEAM

#: From here on sharing pays: torch's threads mostly are awake, ours have to be woken.
_TEAM_FROM, _POOL_FROM = 1 << 16, 1 << 19
#: Values that one of our threads takes at a time: at least some 20 us of work.
_LEAST_CHUNK, _MOST_CHUNK = 1 << 15, 1 << 18
#: Chunks for each thread to aim for: one whose core is busy with something else takes fewer.
_CHUNKS_OF_A_THREAD = 4


@dataclass(frozen=True)
class _Way:
    """How one dtype is counted: the work of a thread, and the encoding whose row it fills."""

    work: str
    encoding: Encoding

    def row(self, address: int, length: int, threads: int = 1) -> torch.Tensor:
        """The row of so many values in memory; by more threads than one, which must be torch's."""
        row = torch.empty(self.encoding.layout.length, dtype=torch.int64, device="cpu")
        team = TEAM.addresses if threads > 1 else NO_TEAM
        shares.fill_row(shares.address_of(self.work), address, length, row.data_ptr(), len(row), threads, team)
        return row

    def row_of_pieces(self, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
        """The row of all values in these dense pieces, counted by this thread."""
        return merge_rows([self.row(piece.data_ptr(), piece.numel()) for piece in pieces] or [self.row(0, 0)])


_WAYS = {
    torch.float32: _Way("count float32", BINARY32),
    torch.float64: _Way("count float64", BINARY64),
    torch.float16: _Way("count float16", BINARY32),
    torch.bfloat16: _Way("count bfloat16", BINARY32),
}

#: Compiled at any rate: what tensors of a training in mixed precision have.
_USUAL = (torch.float32, torch.float16, torch.bfloat16)
#: The dtypes whose loops are compiled: no other is counted this way, for a compiler takes seconds. 8-bit ones never are,
#: whose few codes torch counts as fast.
ready: set[torch.dtype] = set()


def count(values: torch.Tensor) -> torch.Tensor:
    """The row of a strided CPU tensor of a dtype that is ``ready``, any shape and strides."""
    way = _WAYS[values.dtype]
    threads, length = torch.get_num_threads(), values.numel()
    dense = values.is_contiguous() or fills_its_memory(values)
    if dense and (threads == 1 or length < _TEAM_FROM):
        return way.row(values.data_ptr(), length)
    if dense and TEAM.there:
        return way.row(values.data_ptr(), length, threads)
    pieces, times = flat_bits(values, _chunk(length, threads))
    row = merge_rows(POOL.map(way.row_of_pieces, list(pieces), threads if length >= _POOL_FROM else 1))
    if times != 1:
        row[:MIN_BITS] *= times
        row[HEADER:] *= times
    return row


def _chunk(values: int, threads: int) -> int:
    return min(max(_LEAST_CHUNK, -(-values // (_CHUNKS_OF_A_THREAD * threads))), _MOST_CHUNK)


def warm_up(dtypes: Iterable[torch.dtype] = ()) -> None:
    """Compile the loops of these dtypes and the usual ones, or read them from numba's cache.

    Takes seconds the first time on a machine, some tenths of one the first time in a process, and no time after that.
    """
    for dtype in {*_USUAL, *dtypes}.intersection(_WAYS).difference(ready):
        shares.address_of(_WAYS[dtype].work)
        ready.add(dtype)
