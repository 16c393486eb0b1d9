"""Distributed tensors: only this process's part of them is ever looked at, so no collective runs inside a hook."""

from __future__ import annotations

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; any other tensor as it is. No communication."""
    if type(tensor) is torch.Tensor:
        # Nearly always, and cheaper than to ask for an attribute that is not there.
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def is_distributed(parameter: torch.Tensor) -> bool:
    """Whether it is a DTensor: tensor hooks never fire on those of FSDP2, post-accumulate hooks do."""
    return hasattr(parameter, "_local_tensor")
