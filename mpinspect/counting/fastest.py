"""Counting by the fastest way that this machine has for a tensor; every way fills the same row with the same integers.

``reference`` is the way that needs nothing but torch; it is taken where the others are missing or do not apply. On a
CPU the loops compiled by numba are several times faster (the extra mpinspect[cpu]), on a CUDA device Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpinspect.counting import reference
from mpinspect.counting.apart import COMPILING, apart
from mpinspect.counting.cpu import available as on_cpu
from mpinspect.counting.cuda import available as on_gpu
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


def warm_up(devices: Iterable[torch.device] = (), *, compile_here: bool = False) -> list[str]:
    """Load what will count, so that no training step waits for it.

    Once on a machine, Triton's kernels take seconds to compile. Numba's are compiled by another process; torch counts until then.

    Args:
        devices: those on which tensors will lie; the CPU is always prepared for.
        compile_here: compile numba's in this process, and wait for it (a minute, once on a machine): for tests and benchmarks.

    Returns:
        A sentence on each way that does not work though it should; the next slower one counts instead.
    """
    if compile_here:
        on_cpu.AVAILABLE.compile_here()
    else:
        on_cpu.loops()
    gpus = [device for device in devices if device.type == "cuda"]
    said = [on_cpu.AVAILABLE.trouble, apart(lambda: on_gpu.warm_up(gpus), COMPILING) if gpus else ""]
    return [sentence for sentence in said if sentence]


def _count_on_cpu(values: torch.Tensor) -> torch.Tensor | None:
    """Return the row of a strided CPU tensor; None where the compiled loops can't be used, or are none for its dtype."""
    counter = cpu_counter()
    if counter is None or values.dtype not in counter.WORK:
        return None
    row: torch.Tensor = counter.count(values)
    return row


#: By type of device: the row of a strided tensor, or None where this way does not apply.
_WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {"cpu": _count_on_cpu, "cuda": on_gpu.count}


def cpu_counter() -> Any:
    """``counting.cpu.counter``; None where torch is to count, which may change in a training's first minutes on a machine."""
    loops = on_cpu.loops()
    return None if loops is None else loops.counter
