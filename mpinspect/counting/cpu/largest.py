"""The largest magnitude among values in memory, by numba's loops: read once, as fast as memory allows.

Without its sign the bits of an IEEE value order as its magnitude does, infinity above all finite values and NaN above
infinity: one unsigned maximum tells the three apart, where ``torch.aminmax`` compares floats twice and looks out for NaN.
All arithmetic is on integers, so that a flush-denormals mode changes nothing. Importing compiles (or loads what was compiled
before), so that no training step does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mpinspect.counting.cpu import shares
from mpinspect.workers import NO_TEAM, TEAM


@dataclass(frozen=True)
class Largest:
    """How one dtype's largest magnitude is found. Holds no interpreter lock.

    Args:
        work: address of what a thread does.
        value: from a magnitude's bits to the value.
    """

    work: int
    value: Callable[[int], float]

    def of(self, address: int, length: int, threads: int = 1) -> float:
        """The largest magnitude of so many values, 1 or more, from an address on; NaN if one is.

        Args:
            threads: more than one only if ``TEAM`` is there.
        """
        team = TEAM.addresses if threads > 1 else NO_TEAM
        return self.value(shares.largest(self.work, address, length, threads, team))


def _float16(bits: int) -> float:
    return float(np.uint16(bits).view(np.float16))


def _bfloat16(bits: int) -> float:
    return float(np.uint32(bits << 16).view(np.float32))


def _float32(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _float64(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


_OF_16, _OF_32, _OF_64 = (shares.address_of(f"largest of {width} bits") for width in (16, 32, 64))
LARGEST: dict[torch.dtype, Largest] = {
    torch.float32: Largest(_OF_32, _float32),
    torch.float64: Largest(_OF_64, _float64),
    torch.float16: Largest(_OF_16, _float16),
    torch.bfloat16: Largest(_OF_16, _bfloat16),
}
