"""Distributed tensors: only this process's part of them is ever looked at, so no hook starts a collective."""

from __future__ import annotations

from typing import Any

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, and what a collective under way brings; any other tensor as it is.

    Starts no communication. For a collective that the training has started it waits as the tensor's next user would: the host
    for gloo's, the current stream for NCCL's.
    """
    if type(tensor) is torch.Tensor:
        # Nearly always, and cheaper than to ask for an attribute that is not there.
        return tensor
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local_part(local)
    if hasattr(tensor, "trigger_wait"):
        # An AsyncCollectiveTensor, whose class is not imported by those who have none.
        under_way: Any = tensor
        with torch.no_grad():
            arrived: torch.Tensor = under_way.wait()
        return arrived
    return tensor


def is_distributed(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor: tensor hooks never fire on those of FSDP2, post-accumulate hooks do."""
    return hasattr(parameter, "_local_tensor")
