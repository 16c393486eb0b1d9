"""Modules that cannot make an infinity or a NaN of finite values: what went in was looked at, so what comes out need not be.

Each computes |f(x)| <= max(|x|, 1), value by value. That is certain only while a module runs torch's own code and nothing else
can change what it returns, so both are asked at each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

#: With the forward that each had when this was imported: one that is replaced later is unknown code.
_FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (
        *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softsign),
        *(nn.Flatten, nn.Unflatten, nn.Identity),
    )
}
#: Some compute powers of x on their way, the third at most: within the fourth root of the largest value nothing overflows.
_LARGEST = {
    dtype: torch.finfo(dtype).max ** 0.25 for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def may_keep_finite(module: nn.Module) -> bool:
    """Whether the module is of a kind that keeps finite values finite."""
    return type(module) in _FORWARDS


def keeps_finite(module: nn.Module, tensor: torch.Tensor, largest: float) -> bool:
    """Whether ``tensor``, which the module has just returned, is certainly finite.

    Args:
        module: one of those that ``may_keep_finite``, with one forward hook of ours.
        tensor: its output.
        largest: largest magnitude of what went in, finite.
    """
    return (
        largest <= _LARGEST.get(tensor.dtype, 0.0)
        and len(module._forward_hooks) == 1
        and "forward" not in vars(module)
        and type(module).forward is _FORWARDS[type(module)]
        and not global_hooks._global_forward_hooks
    )
