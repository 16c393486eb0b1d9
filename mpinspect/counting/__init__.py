"""From a tensor to its ExponentHistogram. One file per way of counting; all fill the row of ``layout``.

torch is loaded by the ways that need it, when they are asked for: arrays are counted without.
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
    """Return the exponent histogram of a tensor's elements, exactly; of a NumPy array's too.

    Waits for the device that the tensor lies on; ``counting.count`` does not. An array is counted without torch.

    Args:
        tensor: any shape and layout; float64, float32, float16, bfloat16, float8 or complex (both parts are counted).
            A sparse tensor counts with the zeros that it does not store. Arrays of ml_dtypes are known too.

    Raises:
        TypeError: a dtype without exponents, or neither a tensor nor an array.
        ValueError: a tensor on the meta device.
    """
    if isinstance(tensor, (np.ndarray, np.generic)):
        return decode(count_array(np.asarray(tensor)))
    from mpinspect.counting import fastest

    return decode(fastest.count(tensor).cpu().numpy())
