"""From a CPU tensor to its row of counts with the compiled loops of ``kernels``, on a few threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting.bits import BINARY32, BINARY64, Encoding, float64_bits, merge_rows
from mpinspect.counting.cpu import kernels
from mpinspect.counting.layout import HEADER, MAX_BITS, MIN_BITS, NO_MINIMUM
from mpinspect.counting.pieces import flat_bits
from mpinspect.workers import POOL

Bits = npt.NDArray[np.unsignedinteger[Any]]

#: Values that a thread takes at a time: some 100 us of work.
_CHUNK = 1 << 17
#: From here on waking other threads pays.
_POOL_FROM = 1 << 19


@dataclass(frozen=True)
class _Way:
    """How one dtype is counted: the loop, the words it takes, and the encoding whose row it fills."""

    add: Callable[[Bits, npt.NDArray[np.int64], Bits], None]
    int_dtype: torch.dtype
    word: Any
    encoding: Encoding

    def row(self, chunks: Iterable[Bits]) -> torch.Tensor:
        """The row of all values in the chunks."""
        row = np.zeros(self.encoding.layout.length, np.int64)
        ends = _ENDS[self.encoding].copy()
        for chunk in chunks:
            self.add(chunk, row, ends)
        below_low, high = ends.tolist()
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
    torch.float32: _Way(kernels.add_float32, torch.int32, np.uint32, BINARY32),
    torch.float64: _Way(kernels.add_float64, torch.int64, np.uint64, BINARY64),
    torch.float16: _Way(kernels.add_float16, torch.int16, np.uint16, BINARY32),
    torch.bfloat16: _Way(kernels.add_bfloat16, torch.int16, np.uint16, BINARY32),
}

#: The dtypes that are counted this way; the few codes of 8-bit ones are counted by torch as fast.
DTYPES = frozenset(_WAYS)


def count(values: torch.Tensor) -> torch.Tensor:
    """The row of a strided CPU tensor of one of ``DTYPES``, any shape and strides."""
    way = _WAYS[values.dtype]
    if values.is_contiguous():
        bits = values.view(way.int_dtype).numpy().reshape(-1).view(way.word)
        if len(bits) < _POOL_FROM:
            return way.row((bits,))
        chunks, times = [bits[start : start + _CHUNK] for start in range(0, len(bits), _CHUNK)], 1
    else:
        pieces, times = flat_bits(values, _CHUNK)
        chunks = [piece.numpy().view(way.word) for piece in pieces]
    threads = torch.get_num_threads() if values.numel() >= _POOL_FROM else 1
    row = merge_rows(POOL.map(way.row, chunks, threads))
    if times != 1:
        row[:MIN_BITS] *= times
        row[HEADER:] *= times
    return row


def warm_up() -> None:
    """Compile every loop, or read it from numba's cache: seconds the first time on a machine, then some tenths of one."""
    for dtype in _WAYS:
        count(torch.ones(1, dtype=dtype, device="cpu"))
