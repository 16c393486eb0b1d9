"""What an optimizer holds."""

from __future__ import annotations

import torch


def held_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of every group, in their order; the same tensors that ``step`` changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
