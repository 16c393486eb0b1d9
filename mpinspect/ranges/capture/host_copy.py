"""Values on their way to the host: nobody waits for them before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy.typing as npt
import torch


class HostCopy:
    """A tensor on its way to the host: at once from a CPU, on the current stream and asynchronously from a GPU.

    The page-locked memory is torch's, which hands the same blocks out again: after the first steps none is allocated.
    """

    def __init__(self, stacked: torch.Tensor) -> None:
        #: Passed by the device once the values are there; None where they are already.
        self.event: Any = None
        if stacked.device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(stacked.device))
        else:
            self._host = stacked.to("cpu")

    def ready(self) -> bool:
        """Whether the values are there; does not wait."""
        return self.event is None or bool(self.event.query())

    def values(self) -> npt.NDArray[Any]:
        """The values; waits for the GPU where they are not there yet."""
        if self.event is not None:
            self.event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


def copy_groups(
    groups: Iterable[list[int]], copy: Callable[[list[int]], HostCopy], failed: Callable[[int, Exception], None]
) -> list[tuple[list[int], HostCopy]]:
    """Copy each group of tensors at once, with their places; where that fails, each alone, so that no other is lost with one.

    Args:
        groups: places of tensors that can be stacked.
        copy: copies the tensors at some places, as one whose first dimension is theirs.
        failed: called with the place of a tensor that can't be copied, and the error.
    """
    copies = []
    for places in groups:
        try:
            copies.append((places, copy(places)))
        except Exception:
            for place in places:
                try:
                    copies.append(([place], copy([place])))
                except Exception as error:
                    failed(place, error)
    return copies
