"""From a CPU tensor to its row of counts with the compiled loops of ``kernels``, on a few threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting.bits import BINARY32, BINARY64, Encoding, float64_bits, merge_rows
from mpinspect.counting.cpu import kernels, shares
from mpinspect.counting.layout import HEADER, MAX_BITS, MIN_BITS, NO_MINIMUM
from mpinspect.counting.pieces import flat_bits
from mpinspect.workers import POOL, TEAM

Bits = npt.NDArray[np.unsignedinteger[Any]]

#: Values that a thread takes at a time: at least some 20 us of work, at most as many as are counted before they are added up.
_LEAST_CHUNK, _MOST_CHUNK = 1 << 15, 63 << 12
#: Chunks for each thread to aim for: one whose core is busy with something else takes fewer.
_CHUNKS_OF_A_THREAD = 4
#: From here on sharing pays: torch's threads mostly are awake, ours have to be woken.
_TEAM_FROM, _POOL_FROM = 1 << 16, 1 << 19


@dataclass(frozen=True)
class _Way:
    """How one dtype is counted: the loop, the words it takes, and the encoding whose row it fills."""

    name: str
    add: Callable[[Bits, npt.NDArray[np.int64], Bits], None]
    int_dtype: torch.dtype
    word: Any
    encoding: Encoding

    def row(self, chunks: Iterable[Bits]) -> torch.Tensor:
        """The row of all values in the chunks, counted by this thread."""
        row = np.zeros(self.encoding.layout.length, np.int64)
        ends = _ENDS[self.encoding].copy()
        for chunk in chunks:
            self.add(chunk, row, ends)
        return self._finished(row, *ends.tolist())

    def row_by_team(self, bits: Bits, threads: int) -> torch.Tensor:
        """The row of the values, counted by torch's threads."""
        rows = np.zeros((threads, self.encoding.layout.length), np.int64)
        ends = np.tile(_ENDS[self.encoding], (threads, 1))
        job = shares.job(bits, rows, ends, _chunk(len(bits), threads))
        TEAM.run(shares.address_of(self.name), job.ctypes.data, threads)
        return self._finished(rows.sum(0), int(ends[:, 0].min()), int(ends[:, 1].max()))

    def _finished(self, row: npt.NDArray[np.int64], below_low: int, high: int) -> torch.Tensor:
        least = below_low + 1
        row[MIN_BITS] = float64_bits(least, self.encoding) if least < self.encoding.infinity else NO_MINIMUM
        row[MAX_BITS] = float64_bits(high, self.encoding)
        return torch.from_numpy(row)


#: The least magnitude minus one, and the largest, of no values.
_ENDS: dict[Encoding, Bits] = {
    BINARY32: np.array([2**32 - 1, 0], np.uint32),
    BINARY64: np.array([2**64 - 1, 0], np.uint64),
}
_WAYS = {
    torch.float32: _Way("float32", kernels.add_float32, torch.int32, np.uint32, BINARY32),
    torch.float64: _Way("float64", kernels.add_float64, torch.int64, np.uint64, BINARY64),
    torch.float16: _Way("float16", kernels.add_float16, torch.int16, np.uint16, BINARY32),
    torch.bfloat16: _Way("bfloat16", kernels.add_bfloat16, torch.int16, np.uint16, BINARY32),
}

#: Compiled at any rate: what tensors of a training in mixed precision have.
_USUAL = (torch.float32, torch.float16, torch.bfloat16)
#: The dtypes whose loops are compiled: no other is counted this way, for a compiler takes seconds. 8-bit ones never are,
#: whose few codes torch counts as fast.
ready: set[torch.dtype] = set()


def count(values: torch.Tensor) -> torch.Tensor:
    """The row of a strided CPU tensor of a dtype that is ``ready``, any shape and strides."""
    way = _WAYS[values.dtype]
    threads = torch.get_num_threads()
    if values.is_contiguous():
        bits = values.view(way.int_dtype).numpy().reshape(-1).view(way.word)
        if threads == 1 or len(bits) < _TEAM_FROM:
            return way.row((bits,))
        if TEAM.there:
            return way.row_by_team(bits, threads)
        size = _chunk(len(bits), threads)
        chunks, times = [bits[start : start + size] for start in range(0, len(bits), size)], 1
    else:
        pieces, times = flat_bits(values, _chunk(values.numel(), threads))
        chunks = [piece.numpy().view(way.word) for piece in pieces]
    row = merge_rows(POOL.map(way.row, chunks, threads if values.numel() >= _POOL_FROM else 1))
    if times != 1:
        row[:MIN_BITS] *= times
        row[HEADER:] *= times
    return row


def _chunk(values: int, threads: int) -> int:
    """Values to take at a time: whole blocks."""
    return min(max(_LEAST_CHUNK, -(-values // (_CHUNKS_OF_A_THREAD * threads)) >> 12 << 12), _MOST_CHUNK)


def warm_up(dtypes: Iterable[torch.dtype] = ()) -> None:
    """Compile the loops of these dtypes and the usual ones, or read them from numba's cache.

    Takes seconds the first time on a machine, some tenths of one the first time in a process, and no time after that.
    """
    for dtype in {*_USUAL, *dtypes}.intersection(_WAYS).difference(ready):
        count(torch.ones(1, dtype=dtype, device="cpu"))
        if TEAM.there:
            shares.address_of(_WAYS[dtype].name)
        ready.add(dtype)
