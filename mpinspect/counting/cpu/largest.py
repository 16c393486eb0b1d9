"""Finds the largest magnitude of values in memory with numba's loops: one read, at memory speed.

Without the sign, an IEEE value's bits sort by magnitude, infinity above all finite values and NaN above infinity. So one
unsigned maximum distinguishes the three; ``torch.aminmax`` compares floats twice and handles NaN separately. Importing
compiles the loops or reads them from numba's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpinspect.counting.cpu import shares
from mpinspect.runtime.workers import NO_TEAM


@dataclass(frozen=True)
class Largest:
    """How one dtype's largest magnitude is found. Runs without the GIL.

    Args:
        work: address of the C function that a thread runs.
        mantissa_bits, bias: of the encoding.
    """

    work: int
    mantissa_bits: int
    bias: int

    def of(self, address: int, length: int, threads: int = 1, team: tuple[int, int] = NO_TEAM) -> float:
        """Return the largest magnitude of ``length`` values, 1 or more, at an address; NaN if one is NaN.

        Args:
            threads, team: the threads that share the work; more than one only with the addresses of ``TEAM``.
        """
        found: float = shares.largest(self.work, address, length, self.mantissa_bits, self.bias, threads, team)
        return found


_OF_16, _OF_32, _OF_64 = (shares.address_of(f"largest of {width} bits") for width in (16, 32, 64))
LARGEST: dict[torch.dtype, Largest] = {
    torch.float32: Largest(_OF_32, 23, 127),
    torch.float64: Largest(_OF_64, 52, 1023),
    torch.float16: Largest(_OF_16, 10, 15),
    torch.bfloat16: Largest(_OF_16, 7, 127),
}
