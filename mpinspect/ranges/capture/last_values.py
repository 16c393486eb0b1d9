"""What was found in the tensor before, for the next one where that holds the same values: they are not read twice.

A container hands on the very tensor that its last layer made, or the same memory in another shape, and its output's gradient
goes on to that layer likewise.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

#: Smaller tensors are read in no more time than it takes to find out.
_LEAST = 1 << 16

Found = TypeVar("Found")


class LastValues(Generic[Found]):
    """Remembers one tensor, which it does not hold, and what was found in it."""

    __slots__ = ("_address", "_dtype", "_found", "_length", "_owner", "_version", "remembers")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Of the tensors to come none is that one."""
        self.remembers = False
        self._found: Found | None = None

    def found_in(self, tensor: torch.Tensor) -> Found | None:
        """What was found in the tensor before, if this one is of the same memory, unchanged since; else None.

        Memory that is written to round its version (``.data``) passes for unchanged.
        """
        if not self.remembers or tensor.numel() != self._length or not _is_plain(tensor):
            return None
        base, owner = tensor._base, self._owner()
        same = (
            # As long as its owner lives memory is not given to another tensor.
            owner is not None
            and owner is (tensor if base is None else base)
            and tensor.data_ptr() == self._address
            and tensor.dtype is self._dtype
            and tensor._version == self._version
        )
        return self._found if same else None

    def keep(self, tensor: torch.Tensor, found: Found | None) -> None:
        """Remember this one instead, unless it is small, or nothing was found in it."""
        self.remembers = found is not None and tensor.numel() >= _LEAST and _is_plain(tensor)
        if self.remembers:
            base = tensor._base
            self._owner = weakref.ref(tensor if base is None else base)
            self._address, self._length, self._dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype
            self._version, self._found = tensor._version, found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory and version say all about its values."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )
