"""Decides whether the kernels can be used on CUDA tensors; after a failure in this process, never tries again.

Their exceptions are caught, except out-of-memory errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from mpinspect.numeric.blocks import BlockCounts

_trouble: list[str] = []


def counter() -> ModuleType | None:
    """Return ``mpinspect.counting.cuda.counter``; None without CUDA, or if it failed in this process."""
    return None if _trouble else _loaded()


def gave_up(error: Exception) -> None:
    """Disable the kernels for the rest of this process after they failed with ``error``.

    Raises:
        torch.OutOfMemoryError: ``error`` is one; it is re-raised, and the kernels stay enabled.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _trouble.append(f"The counting kernels do not work here ({' '.join(str(error).split())[:200]})")


def trouble() -> str:
    """Return a clause on why the kernels are not used on CUDA devices; "" if no problem is known."""
    return next((f"{each}: counting on a GPU takes many times longer" for each in _trouble), "")


def count(values: torch.Tensor) -> torch.Tensor | None:
    """Return the row of a strided CUDA tensor, like ``counter.count``; None if the kernels can't be used."""
    ways: Any = counter()
    if ways is None or values.dtype not in ways.DTYPES:
        return None
    try:
        row: torch.Tensor = ways.count(values)
    except Exception as error:
        gave_up(error)
        return None
    return row


def count_blocks(values: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> BlockCounts | None:
    """Return the counts of a CUDA matrix's blocks, like ``cuda.blocks.count``; None if the kernels can't be used."""
    if counter() is None:
        return None
    from mpinspect.counting.cuda import blocks

    if not blocks.takes(values, size):
        return None
    try:
        return blocks.count(values, size, block)
    except Exception as error:
        gave_up(error)
        return None


def warm_up(devices: Iterable[torch.device]) -> str:
    """Compile the kernels for the CUDA devices among ``devices``, and return ``trouble()``."""
    gpus = [device for device in devices if device.type == "cuda"]
    ways: Any = counter() if gpus else None
    if ways is not None:
        try:
            ways.warm_up(gpus)
        except Exception as error:
            gave_up(error)
    return trouble()


@cache
def _loaded() -> ModuleType | None:
    if torch.version.cuda is None:
        _trouble.append("The counting kernels are for CUDA")
        return None
    from mpinspect.counting.cuda import counter as loaded

    return loaded
