"""Counts with the fastest implementation available for a tensor; every implementation fills the same row with the same counts.

``reference`` needs only torch, and is used if no other implementation is available or applies. Several times faster are the
loops compiled by numba on a CPU (the extra mpinspect[cpu]), and the CUDA kernels on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpinspect.counting import reference
from mpinspect.counting.apart import apart
from mpinspect.counting.cpu import available as on_cpu
from mpinspect.counting.cuda import available as on_gpu
from mpinspect.counting.layout import ZEROS
from mpinspect.counting.pieces import plain_values


@torch.no_grad()
def count(tensor: torch.Tensor, divisor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Count the exponents of a tensor's elements; arguments, result and errors are the same as in ``reference.count``."""
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
    """Load the counting implementations in advance, so that no training step waits for loading or compiling.

    The CUDA kernels take a second to compile in every process. Numba's loops are compiled by another process, and torch counts
    until they are ready.

    Args:
        devices: the devices of the tensors to count; the CPU is always included.
        compile_here: compile numba's loops in this process and wait (a minute, once per machine); for tests and benchmarks.

    Returns:
        A sentence for each implementation that should work but does not; the next slower one counts instead.
    """
    if compile_here:
        on_cpu.AVAILABLE.compile_here()
    else:
        on_cpu.loops()
    gpus = [device for device in devices if device.type == "cuda"]
    said = [on_cpu.AVAILABLE.trouble, apart(lambda: on_gpu.warm_up(gpus)) if gpus else ""]
    return [sentence for sentence in said if sentence]


def _count_on_cpu(values: torch.Tensor) -> torch.Tensor | None:
    """Return the row of a strided CPU tensor; None if there are no usable compiled loops for its dtype."""
    counter = cpu_counter()
    if counter is None or values.dtype not in counter.WORK:
        return None
    row: torch.Tensor = counter.count(values)
    return row


#: By device type: functions that return a strided tensor's row, or None if the implementation does not apply.
_WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {"cpu": _count_on_cpu, "cuda": on_gpu.count}


def cpu_counter() -> Any:
    """Return ``counting.cpu.counter``; None while torch must count, as until numba's loops are first compiled."""
    loops = on_cpu.loops()
    return None if loops is None else loops.counter
