"""The storages of tensors, which views share: their keys, and references that end with them."""

from __future__ import annotations

import weakref
from typing import TypeGuard

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether this is a dense tensor or parameter (no subclass), whose storage holds its elements."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_nested
    )


class StorageReference:
    """Knows whether a tensor's storage still lives, and keeps neither the storage nor its memory.

    torch keeps a storage's object as long as its memory. Its own StorageWeakRef would make torch 2.6 keep the object longer, so
    that other references to it never end.
    """

    __slots__ = ("_storage", "key")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = int(storage._cdata)
        self._storage = weakref.ref(storage)

    def expired(self) -> bool:
        """Return whether the storage has been freed. Another one may have its key then."""
        return self._storage() is None

    def is_of(self, tensor: torch.Tensor) -> bool:
        return not self.expired() and self.key == storage_key(tensor)
