"""The largest magnitude among values in memory, compiled by numba: read once, as fast as memory allows.

Without its sign the bits of an IEEE value order as its magnitude does, infinity above all finite values and NaN above
infinity: one unsigned maximum tells the three apart, where ``torch.aminmax`` compares floats twice and looks out for NaN.
All arithmetic is on integers, so that a flush-denormals mode changes nothing. Signatures are given so that importing
compiles (or loads what was compiled before), and no training step does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from mpinspect.counting.cpu.compiling import compiled, compiled_for, function_of_c
from mpinspect.counting.cpu.memory import as_type, fetch_and_add, pointer
from mpinspect.workers import TEAM

carray: Any = numba.carray  # type: ignore[attr-defined]

#: Values that a thread of a team takes at a time.
_CHUNK = 1 << 16
#: What a team is given: the values' address and number, the address of the threads' results, and what threads draw from.
_ADDRESS, _LENGTH, _RESULTS, _NUMBERS, _NEXT = range(5)
_FIELDS = 5


@compiled
def _largest(address: Any, length: Any, one: Any) -> Any:
    """The largest magnitude's bits; ``one``: 1 as an unsigned integer as wide as a value."""
    bits = carray(pointer(address, one), (length,))
    high = as_type(one - one, one)
    for i in range(length):
        # The sign is shifted out at the top.
        high = max(high, as_type(bits[i] << one, one))
    return as_type(high >> one, one)


@compiled
def _share(address: Any, one: Any, size: Any) -> None:
    job = carray(pointer(address, np.int64(0)), (_FIELDS,))
    number = fetch_and_add(address + 8 * _NUMBERS, 1)
    high = as_type(one - one, one)
    start = fetch_and_add(address + 8 * _NEXT, _CHUNK)
    while start < job[_LENGTH]:
        high = max(high, _largest(job[_ADDRESS] + start * size, min(_CHUNK, job[_LENGTH] - start), one))
        start = fetch_and_add(address + 8 * _NEXT, _CHUNK)
    carray(pointer(job[_RESULTS], np.int64(0)), (number + 1,))[number] = np.int64(high)


@compiled_for("int64(int64, int64)")
def _of_16_bits(address: Any, length: Any) -> Any:
    return np.int64(_largest(address, length, np.uint16(1)))


@compiled_for("int64(int64, int64)")
def _of_32_bits(address: Any, length: Any) -> Any:
    return np.int64(_largest(address, length, np.uint32(1)))


@compiled_for("int64(int64, int64)")
def _of_64_bits(address: Any, length: Any) -> Any:
    return np.int64(_largest(address, length, np.uint64(1)))


def _share_of_16_bits(address: Any) -> None:
    _share(address, np.uint16(1), 2)


def _share_of_32_bits(address: Any) -> None:
    _share(address, np.uint32(1), 4)


def _share_of_64_bits(address: Any) -> None:
    _share(address, np.uint64(1), 8)


@dataclass(frozen=True)
class Largest:
    """How one dtype's largest magnitude is found. Holds no interpreter lock.

    Args:
        bits: from an address and a number of values, 1 or more, to the largest magnitude's bits.
        share: address of a C function for a team, or 0 where there is none.
        value: from bits to the value.
    """

    bits: Callable[[int, int], int]
    share: int
    value: Callable[[int], float]

    def alone(self, address: int, length: int) -> float:
        """The largest magnitude of so many values from an address on, NaN if one is; read by this thread."""
        return self.value(self.bits(address, length))

    def by_team(self, address: int, length: int, threads: int) -> float:
        """The same, read by torch's threads."""
        results = np.zeros(threads, np.int64)
        job = np.array([address, length, results.ctypes.data, 0, 0], np.int64)
        TEAM.run(self.share, job.ctypes.data, threads)
        return self.value(int(results.max()))


def _float16(bits: int) -> float:
    return float(np.uint16(bits).view(np.float16))


def _bfloat16(bits: int) -> float:
    return float(np.uint32(bits << 16).view(np.float32))


def _float32(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _float64(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


_SHARE_OF_16, _SHARE_OF_32, _SHARE_OF_64 = (
    function_of_c(share) if TEAM.there else 0 for share in (_share_of_16_bits, _share_of_32_bits, _share_of_64_bits)
)
LARGEST: dict[torch.dtype, Largest] = {
    torch.float32: Largest(_of_32_bits, _SHARE_OF_32, _float32),
    torch.float64: Largest(_of_64_bits, _SHARE_OF_64, _float64),
    torch.float16: Largest(_of_16_bits, _SHARE_OF_16, _float16),
    torch.bfloat16: Largest(_of_16_bits, _SHARE_OF_16, _bfloat16),
}
