"""Whether the kernels can be used: Triton is loaded at the first CUDA tensor, and left alone for good once it has failed.

Nothing here raises what Triton raises. Importing this module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch

_trouble: list[str] = []


def counter() -> ModuleType | None:
    """``mpinspect.counting.cuda.counter``; None where Triton is missing or has failed in this process."""
    return None if _trouble else _loaded()


def gave_up(error: Exception) -> None:
    """The kernels failed: they are not tried again in this process.

    Raises:
        torch.OutOfMemoryError: handed on, for it is no fault of the kernels.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _trouble.append(f"Triton does not work here ({' '.join(str(error).split())[:200]})")


def trouble() -> str:
    """A sentence on why the kernels are not used on this machine's CUDA devices; "" where nothing is known against them."""
    return f"{_trouble[0]}: counting on a GPU takes many times longer" if _trouble else ""


def count(values: torch.Tensor) -> torch.Tensor | None:
    """Return the row of a strided CUDA tensor, as from ``counter.count``; None where the kernels can't be used."""
    ways: Any = counter()
    if ways is None or values.dtype not in ways.DTYPES:
        return None
    try:
        row: torch.Tensor = ways.count(values)
    except Exception as error:
        gave_up(error)
        return None
    return row


def warm_up(devices: Iterable[torch.device]) -> str:
    """Compile for these devices what will count on them, other than CUDA devices left out; ``trouble`` is returned."""
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
        # Never run on another maker's GPUs.
        _trouble.append("Counting with Triton is for CUDA")
        return None
    try:
        from mpinspect.counting.cuda import counter as loaded
    except ModuleNotFoundError as error:
        _trouble.append("Triton is not installed" if error.name == "triton" else str(error))
        return None
    except Exception as error:
        gave_up(error)
        return None
    return loaded
