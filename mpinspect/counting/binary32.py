"""Counts float32 values on a CPU at a few tenths of a nanosecond per value.

``bits`` computes every value's slot in about fifteen passes; here only rare values need this. Each chunk gets a plain histogram
of its upper bits. Powers of two and values near the top of their exponent are then found together: both have the largest
mantissa bits after one is subtracted. For uniform significands these are one value in 2048, so only the largest of every 16
values is compared, and only groups with a match are counted value by value. Counting more groups gives the same counts, so
data of powers of two alone is merely slower. Infinities, NaNs, subnormals and zeros each cost another pass over the chunks
that contain them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import torch

from mpinspect.counting.bits import BINARY32, HOST_CHUNK, extremes_on_host, slots_of
from mpinspect.counting.layout import HEADER, INFS, MAX_BITS, MIN_BITS, NANS, NARROW, NO_MINIMUM, ZEROS

# Bits dropped for the histogram. It retains 4 mantissa bits: with fewer, consecutive values of one exponent would often add to
# the same counter and wait for each other. The 2^12 counters of 8 bytes fit in the first-level cache.
_CUT = 19
_BINS = 1 << (31 - _CUT)
_BINS_PER_FIELD = 1 << (23 - _CUT)

_INFINITY_BIN = 255 << (23 - _CUT)

_GROUP = 16
_INFINITY = BINARY32.infinity
_MASK = BINARY32.magnitude_mask
# (bits - 1) without the exponent field is at least this for significands >= 2 - 2^-11 and for powers of two.
_EDGE = 0x7FEFFF
# Keeps the mantissa and the sign bit, which distinguishes zero minus one from a power of two minus one.
_MANTISSA_AND_SIGN = 0x807FFFFF - (1 << 32)
# The same test for chunks without zeros, in one fused operation: _TURN + bits * 2^9 modulo 2^32 is largest for powers of two,
# and next largest for values near the top.
_TURN = 0x7FFFFFFF
_TURNED_EDGE = _TURN - ((0x1000) << 9)

# Slots: subnormals, then three for each normal exponent, then infinity and NaN.
_SUBNORMAL = slice(1, 70)
_NORMAL = slice(70, 832)
_INF_SLOT = 832


class _Buffers(threading.local):
    """Scratch buffers per thread, reused between calls because allocating new memory costs more than the arithmetic."""

    bits: torch.Tensor | None = None
    other: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def of_length(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.bits is None or self.other is None or self.groups is None or len(self.bits) < length:
            # Tensors created under inference mode could not be written in place outside it.
            with torch.inference_mode(False):
                self.bits = torch.empty(length, dtype=torch.int32, device="cpu")
                self.other = torch.empty_like(self.bits)
                self.groups = torch.empty(length // _GROUP, dtype=torch.int32, device="cpu")
        return self.bits[:length], self.other[:length], self.groups[: length // _GROUP]


_buffers = _Buffers()


class _Counter:
    """The counts of one thread's share of the chunks."""

    def __init__(self) -> None:
        self.bins = torch.zeros(_BINS, dtype=torch.int64, device="cpu")
        self.edges = torch.zeros(BINARY32.slots, dtype=torch.int64, device="cpu")
        self.subnormals = torch.zeros(BINARY32.slots, dtype=torch.int64, device="cpu")
        self.low, self.high = NO_MINIMUM, 0
        self._waiting: list[torch.Tensor] = []
        self._waiting_length = 0
        self._turn = torch.tensor(_TURN, dtype=torch.int32, device="cpu")

    def add(self, chunk: torch.Tensor) -> None:
        """Count a one-dimensional int32 chunk of bits."""
        bits, other, groups = _buffers.of_length(len(chunk))
        torch.bitwise_and(chunk, _MASK, out=bits)
        torch.bitwise_right_shift(bits, _CUT, out=other)
        bins = torch.bincount(other, minlength=_BINS)
        self.bins += bins
        if bins[0]:
            low, high = self._with_zeros(bits, other, infinities=bool(bins[_INFINITY_BIN:].any()))
            edge = _EDGE
        else:
            low, high = extremes_on_host(bits, BINARY32, other)
            torch.add(self._turn, bits, alpha=512, out=other)
            edge = _TURNED_EDGE
        self._collect_edges(bits, other, groups, edge)
        if low < _INFINITY:
            self.low = min(self.low, low)
        self.high = max(self.high, high)
        if low < BINARY32.min_normal:
            self._count_subnormals(bits)

    def row(self) -> torch.Tensor:
        """Return the row of all added chunks."""
        self._count_waiting()
        # Uses NumPy, since for small arrays and the cold caches of a training step a call into torch costs several times more.
        fields = self.bins.numpy().reshape(-1, _BINS_PER_FIELD).sum(1)
        edges, subnormals = self.edges.numpy(), self.subnormals.numpy()[_SUBNORMAL]
        row = np.zeros(NARROW.length, dtype=np.int64)
        row[ZEROS] = fields[0] - subnormals.sum()
        row[INFS] = edges[_INF_SLOT]
        row[NANS] = fields[255] - edges[_INF_SLOT]
        row[MIN_BITS] = BINARY32.float64_bits(self.low)
        row[MAX_BITS] = BINARY32.float64_bits(self.high)
        bins = row[HEADER:]
        bins[: len(subnormals)] = subnormals
        threes = bins[len(subnormals) :].reshape(-1, 3)
        threes[:] = edges[_NORMAL].reshape(-1, 3)
        threes[:, 1] = fields[1:255] - threes[:, 0] - threes[:, 2]
        return torch.from_numpy(row)

    @staticmethod
    def _with_zeros(bits: torch.Tensor, other: torch.Tensor, *, infinities: bool) -> tuple[int, int]:
        """Return the extremes of a chunk that may contain zeros, and fill ``other`` for ``_collect_edges``."""
        if infinities:
            low, high = extremes_on_host(bits, BINARY32, other)
            torch.sub(bits, 1, out=other)
        else:
            high = int(bits.amax())
            torch.sub(bits, 1, out=other)
            # Zero minus one is the largest unsigned integer; torch has no minimum for unsigned integers.
            low = int(other.numpy().view(np.uint32).min()) + 1
        other.bitwise_and_(_MANTISSA_AND_SIGN)
        return low, high

    def _collect_edges(self, bits: torch.Tensor, other: torch.Tensor, groups: torch.Tensor, edge: int) -> None:
        """Queue the groups of values with a power of two or a value near the top, where ``other`` is at least ``edge``."""
        grouped = len(groups) * _GROUP
        if grouped:
            torch.amax(other[:grouped].view(_GROUP, -1), 0, out=groups)
            found = (groups >= edge).nonzero().view(-1)
            self._wait(bits[:grouped].view(_GROUP, -1).index_select(1, found).view(-1))
        if grouped < len(bits):
            self._wait(bits[grouped:].clone())

    def _wait(self, values: torch.Tensor) -> None:
        self._waiting.append(values)
        self._waiting_length += len(values)
        if self._waiting_length > HOST_CHUNK // 2:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting_length:
            _add_slots(self.edges, self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting))
        self._waiting, self._waiting_length = [], 0

    def _count_subnormals(self, bits: torch.Tensor) -> None:
        _add_slots(self.subnormals, bits[((bits - 1) & _MASK) < BINARY32.min_normal - 1])


def count_chunks(chunks: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the NARROW row of float32 values.

    Args:
        chunks: one-dimensional int32 CPU tensors of the values' bits; scratch buffers grow to the longest chunk.
    """
    counter = _Counter()
    for chunk in chunks:
        if len(chunk):
            counter.add(chunk)
    return counter.row()


def _add_slots(counts: torch.Tensor, magnitudes: torch.Tensor) -> None:
    for part in torch.split(magnitudes, HOST_CHUNK):
        counts += torch.bincount(slots_of(part, BINARY32), minlength=BINARY32.slots)
