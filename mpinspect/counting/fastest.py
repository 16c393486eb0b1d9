"""Counting by the fastest way that this machine has for a tensor; every way fills the same row with the same integers.

``reference`` is the way that needs nothing but torch; it is taken where the others are missing or do not apply. On a
CPU the loops compiled by numba are several times faster (the extra mpinspect[cpu]).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from mpinspect.counting import reference
from mpinspect.counting.layout import ZEROS
from mpinspect.counting.pieces import plain_values


@torch.no_grad()
def count(tensor: torch.Tensor, divisor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Count the exponents of a tensor's elements: arguments, row and errors are those of ``reference.count``."""
    if divisor is None and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
        counter = _cpu_counter()
        if counter is not None:
            values, implicit_zeros = plain_values(tensor)
            if values.dtype in counter.DTYPES:
                row: torch.Tensor = counter.count(values)
                if implicit_zeros:
                    row[ZEROS] += implicit_zeros
                return row
    return reference.count(tensor, divisor)


def warm_up() -> list[str]:
    """Compile, or load, what will count, so that no training step waits for it; may take some seconds, once on a machine.

    Returns:
        A sentence on each way that is installed and does not work; the next slower one counts instead.
    """
    if _cpu_counter() is None and _trouble:
        return [
            f"numba is installed and does not work here ({_trouble[0]}): counting on the CPU takes several times longer"
        ]
    return []


_trouble: list[str] = []


@cache
def _cpu_counter() -> ModuleType | None:
    """The module that counts with numba, compiled; None where it is not installed or fails."""
    try:
        from mpinspect.counting.cpu import counter

        counter.warm_up()
    except ModuleNotFoundError as error:
        if error.name != "numba":
            _trouble.append(str(error))
        return None
    except Exception as error:
        # Whatever a compiler may raise; counting goes on without it.
        _trouble.append(" ".join(str(error).split())[:200])
        return None
    return counter
