"""Handles distributed tensors, reading only this process's part of them, so that no hook starts a collective."""

from __future__ import annotations

from typing import Any

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, the result of a collective under way, or any other tensor unchanged.

    Starts no communication. Waits for a collective that the training has started, as the tensor's next use would: with
    gloo the host waits, with NCCL the current stream.
    """
    if type(tensor) is torch.Tensor:
        # The usual case; this check is cheaper than looking up a missing attribute.
        return tensor
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local_part(local)
    if hasattr(tensor, "trigger_wait"):
        # An AsyncCollectiveTensor; its class is not imported here, since most processes do not use it.
        under_way: Any = tensor
        with torch.no_grad():
            arrived: torch.Tensor = under_way.wait()
        return arrived
    return tensor


def is_distributed(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor; on FSDP2's parameters post-accumulate hooks run, but tensor hooks never do."""
    return hasattr(parameter, "_local_tensor")


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one. Communicates nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1
