"""Counting by the fastest way that this machine has for a tensor; every way fills the same row with the same integers.

``reference`` is the way that needs nothing but torch; it is taken where the others are missing or do not apply. On a
CPU the loops compiled by numba are several times faster (the extra mpinspect[cpu]), on a CUDA device Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from mpinspect.counting import reference
from mpinspect.counting.apart import apart
from mpinspect.counting.cuda import available
from mpinspect.counting.layout import ZEROS
from mpinspect.counting.pieces import plain_values


@torch.no_grad()
def count(tensor: torch.Tensor, divisor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Count the exponents of a tensor's elements: arguments, row and errors are those of ``reference.count``."""
    if divisor is None and isinstance(tensor, torch.Tensor):
        way = _WAYS.get(tensor.device.type)
        if way is not None:
            values, implicit_zeros = plain_values(tensor)
            row = way(values)
            if row is not None:
                if implicit_zeros:
                    row[ZEROS] += implicit_zeros
                return row
    return reference.count(tensor, divisor)


def warm_up(devices: Iterable[torch.device] = (), dtypes: Iterable[torch.dtype] = ()) -> list[str]:
    """Compile, or load, what will count, so that no training step waits for it; may take twenty seconds, once on a machine.

    Args:
        devices: those on which tensors will lie; the CPU is always prepared for.
        dtypes: those that tensors on a CPU may have beside float32, float16 and bfloat16. What is not prepared for is counted by
            torch alone.

    Returns:
        A sentence on each way that does not work though it should; the next slower one counts instead.
    """
    return apart(lambda: _prepared(list(devices), list(dtypes)))


def _prepared(devices: list[torch.device], dtypes: list[torch.dtype]) -> list[str]:
    said = []
    counter = cpu_counter()
    if counter is not None:
        counter.warm_up(dtypes)
    elif _trouble:
        said.append(
            f"numba is installed and does not work here ({_trouble[0]}): counting on the CPU takes several times longer"
        )
    on_gpu = available.warm_up(devices)
    return [*said, on_gpu] if on_gpu else said


_trouble: list[str] = []


def _count_on_cpu(values: torch.Tensor) -> torch.Tensor | None:
    """The row of a strided CPU tensor; None where numba is not installed or fails, or the dtype was not prepared for."""
    counter: Any = cpu_counter()
    if counter is None or values.dtype not in counter.ready:
        return None
    row: torch.Tensor = counter.count(values)
    return row


#: By type of device: the row of a strided tensor, or None where this way does not apply.
_WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {"cpu": _count_on_cpu, "cuda": available.count}


@cache
def cpu_counter() -> ModuleType | None:
    """``counting.cpu.counter``, ready for the usual dtypes; None where numba is not installed or fails."""
    return apart(_loaded)


def _loaded() -> ModuleType | None:
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
