"""A function of which only the arguments are kept for the backward: what it makes in FP32 on its way is made again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def recomputed(function: Callable[..., torch.Tensor], *tensors: torch.Tensor | None) -> torch.Tensor:
    """``function(*tensors)``, run once more in the backward, both times without autocast.

    Args:
        function: depends on the tensors only, and changes nothing; the same values every time.
        tensors: its positional arguments, None allowed.

    Returns:
        What the function gives; can be differentiated twice.
    """
    result: torch.Tensor = _Recomputed.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Recomputed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., torch.Tensor], *tensors: torch.Tensor | None) -> torch.Tensor:
        return _without_autocast(function, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            # Views, because hooks on the tensors themselves would see the gradient of this part alone.
            tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            result = _without_autocast(ctx.function, tensors)
        inputs = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want and tensor is not None]
        gradients = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
        return (None, *(next(gradients) if want else None for want in wanted))


def _without_autocast(function: Callable[..., torch.Tensor], tensors: Any) -> torch.Tensor:
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    with torch.autocast(device, enabled=False):
        return function(*tensors)
