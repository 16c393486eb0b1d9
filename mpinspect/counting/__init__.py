"""Computes a tensor's ExponentHistogram. Each implementation has its own file; all fill the row defined in ``layout``.

torch is imported only when an implementation that needs it is used; arrays are counted without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpinspect.counting.arrays import count_array
from mpinspect.counting.layout import decode
from mpinspect.numeric.exponents import ExponentHistogram

if TYPE_CHECKING:
    import torch

    from mpinspect.counting.reference import count

__all__ = ["ExponentHistogram", "count", "count_array", "count_exponents", "decode"]


def __getattr__(name: str) -> object:
    if name != "count":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpinspect.counting.reference import count

    globals()["count"] = count
    return count


def count_exponents(tensor: torch.Tensor | npt.NDArray[Any]) -> ExponentHistogram:
    """Return the exact exponent histogram of the elements of a tensor or NumPy array.

    Waits for the tensor's device; ``counting.count`` does not. An array is counted without torch.

    Args:
        tensor: any shape and layout; float64, float32, float16, bfloat16, float8 or complex (both parts are counted).
            The zeros that a sparse tensor does not store are counted too. Arrays of ml_dtypes are supported.

    Raises:
        TypeError: a dtype without exponents, or an object that is neither a tensor nor an array.
        ValueError: a tensor on the meta device.
    """
    if isinstance(tensor, (np.ndarray, np.generic)):
        return decode(count_array(np.asarray(tensor)))
    from mpinspect.counting import fastest

    return decode(fastest.count(tensor).cpu().numpy())
