"""The largest magnitude of a tensor: a number if the host knows it, else device tensors that yield the number later."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from mpinspect.counting import layout
from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.counting.pieces import detached_values
from mpinspect.runtime.device import used_on_current_stream


class Slot(Protocol):
    """A place on a device for a tensor's largest magnitude, which a kernel fills later."""

    def largest(self) -> float | None:
        """Return the largest magnitude, once its step has been sent to the host: NOT_READ if the device skipped the tensor,
        None if reading failed. Waits for the device if the copy is not complete."""


#: The largest magnitude (may be inf or NaN), a slot that will have it, or tensors to derive it from: (minimum, maximum) or
#: (row of counts,).
Value = float | Slot | tuple[torch.Tensor, ...]
#: An observer's result for a tensor: its largest magnitude, or its row of counts.
Found = torch.Tensor | Value


def largest_of(tensor: torch.Tensor, found: Found | None) -> Value | None:
    """Return a tensor's largest magnitude, never waiting for a GPU; None for tensors without values.

    Args:
        tensor: this process's part.
        found: an observer's earlier result for the tensor, if any.
    """
    if found is None:
        largest = largest_magnitude(tensor)
        if largest is not None:
            return largest
        return extremes(tensor) if tensor.numel() else None
    if isinstance(found, torch.Tensor):
        return from_row(found) if found.is_cpu else (found,)
    return found


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return a tensor's minimum and maximum as 0-d tensors on its device (both NaN if any value is); does not synchronise.

    None for empty tensors, tensors without memory, and dtypes that torch cannot reduce (FP8).
    """
    tensor = detached_values(tensor)
    if tensor.layout is not torch.strided:
        # Coalescing waits for the GPU, so an uncoalesced tensor's values are used before duplicates are summed.
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.numel() or tensor.element_size() == 1:
        return None
    if tensor.is_cpu and not has_memory(tensor) and not tensor._is_zerotensor():
        return None
    return tuple(torch.aminmax(tensor))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return False if a tensor's memory was freed, as sharded training does between uses: reading it would crash."""
    return tensor.data_ptr() != 0


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was changed in place; -1 for inference tensors, which do not count changes."""
    return -1 if tensor.is_inference() else tensor._version


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Return whether this is a dense floating-point tensor or parameter (no subclass) of 16 bits or more, with memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.element_size() > 1
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and has_memory(tensor)
    )


def on_host(value: Value) -> float | None:
    """Return the largest magnitude as a number, reading CPU tensors if needed; None if it is still on a device."""
    if isinstance(value, float):
        return value
    if not isinstance(value, tuple) or value[0].device.type != "cpu":
        return None
    return from_extremes(*(each.double().numpy().item() for each in value))


def is_broken(value: Value) -> bool | None:
    """Return whether a tensor is not finite; None if its largest magnitude is still on a device."""
    largest = value if type(value) is float else on_host(value)
    return None if largest is None else not math.isfinite(largest)


def read_largest(tensor: torch.Tensor) -> float:
    """Return a tensor's largest magnitude: NaN if it holds a NaN, -inf if its only infinities are, 0 if it can't be read.

    Waits for a GPU.
    """
    largest = largest_magnitude(tensor)
    if largest is not None:
        return largest
    found = extremes(tensor)
    if found is None:
        return 0.0
    return from_extremes(*map(float, found))


def stacked(values: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Stack pairs of extremes into an (n, 2) float32 or float64 tensor, or the headers of rows into (n, HEADER) int64."""
    for each in values:
        for tensor in each:
            used_on_current_stream(tensor)
    if len(values[0]) == 1:
        return torch.stack([row for (row,) in values])[:, : layout.HEADER].contiguous()
    flat = torch.stack([value for pair in values for value in pair]).view(-1, 2)
    return flat if flat.dtype == torch.float64 else flat.to(torch.float32)


def from_stacked(values: npt.NDArray[Any]) -> list[float]:
    """Return the largest magnitudes from the array that ``stacked`` made."""
    if values.shape[1] == layout.HEADER:
        return _from_heads(values)
    return [from_extremes(*pair) for pair in values.tolist()]


def from_extremes(low: float, high: float) -> float:
    """Return the largest magnitude, given the smallest and the largest value: NaN if either is NaN, -inf if only one is -inf."""
    if math.isnan(low) or math.isnan(high):
        return math.nan
    if low == -math.inf and high < math.inf:
        return low
    return max(abs(low), abs(high))


class _Head(ctypes.Structure):
    """The header of a row of counts, with its extremes as numbers."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("zeros", "infs", "nans")),
        *((name, ctypes.c_double) for name in ("least", "largest")),
    )


def from_row(row: torch.Tensor) -> float:
    """Return the largest magnitude recorded in a row of counts in the host's memory."""
    head = _Head.from_address(row.data_ptr())
    largest: float = math.nan if head.nans else math.inf if head.infs else head.largest
    return largest


def _from_heads(heads: npt.NDArray[np.int64]) -> list[float]:
    largest = heads[:, layout.MAX_BITS].copy().view(np.float64)
    largest[heads[:, layout.INFS] > 0] = math.inf
    largest[heads[:, layout.NANS] > 0] = math.nan
    found: list[float] = largest.tolist()
    return found
