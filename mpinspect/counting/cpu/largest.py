"""The largest magnitude among values in memory, by numba's loops: read once, as fast as memory allows.

Without its sign the bits of an IEEE value order as its magnitude does, infinity above all finite values and NaN above
infinity: one unsigned maximum tells the three apart, where ``torch.aminmax`` compares floats twice and looks out for NaN.
Importing compiles, or reads from numba's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpinspect.counting.cpu import shares
from mpinspect.runtime.workers import NO_TEAM


@dataclass(frozen=True)
class Largest:
    """How one dtype's largest magnitude is found. Holds no interpreter lock.

    Args:
        work: address of what a thread does.
        mantissa_bits, bias: of the encoding.
    """

    work: int
    mantissa_bits: int
    bias: int

    def of(self, address: int, length: int, threads: int = 1, team: tuple[int, int] = NO_TEAM) -> float:
        """The largest magnitude of so many values, 1 or more, from an address on; NaN if one is.

        Args:
            threads, team: to share the work among; more than one only with the addresses of ``TEAM``.
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
