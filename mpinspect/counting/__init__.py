"""From a tensor to its ExponentHistogram. One file per way of counting; all fill the row of ``layout``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting.layout import decode
from mpinspect.counting.reference import count
from mpinspect.exponents import ExponentHistogram

__all__ = ["ExponentHistogram", "count", "count_exponents", "decode"]


def count_exponents(tensor: torch.Tensor | npt.NDArray[np.floating]) -> ExponentHistogram:
    """The exponent histogram of a tensor's elements, exactly; of a NumPy array's too.

    Waits for the device that the tensor lies on; ``counting.count`` does not.

    Args:
        tensor: any shape and layout; float64, float32, float16, bfloat16, float8 or complex (both parts are counted).
            A sparse tensor counts with the zeros that it does not store.

    Raises:
        TypeError: a dtype without exponents, or neither a tensor nor an array.
        ValueError: a tensor on the meta device.
    """
    if isinstance(tensor, np.ndarray):
        tensor = _as_tensor(tensor)
    return decode(count(tensor).cpu().numpy())


def _as_tensor(array: npt.NDArray[np.floating]) -> torch.Tensor:
    if array.dtype.kind not in "fc" or array.dtype.itemsize > 16 or array.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(f"a NumPy array of {array.dtype} has no exponents that torch can count; convert it to float64")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    # Read-only memory and negative strides are things that torch.from_numpy warns of or refuses.
    if not native.flags.writeable or any(stride < 0 for stride in native.strides):
        native = native.copy()
    return torch.from_numpy(native)
