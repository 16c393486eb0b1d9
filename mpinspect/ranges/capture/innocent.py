"""Which modules cannot have made an infinity or NaN: told from their kind, and of a product from the size of its weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.runtime.hooks import ModelHook

#: They compute |f(x)| <= max(|x|, 1), value by value.
VALUE_BY_VALUE: tuple[type[Any], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softsign),
    *(nn.Flatten, nn.Unflatten, nn.Identity),
)
#: Their gradient is at most that at their output. (GELU's and SiLU's may compute infinity times zero of large values.)
NO_STEEPER_THAN_1 = (nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Flatten, nn.Unflatten, nn.Identity)
_PRODUCTS: tuple[type[Any], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The forwards that torch gave them when this was imported: one that is replaced later is unknown code.
_FORWARDS: dict[type[Any], Any] = {kind: kind.forward for kind in (*VALUE_BY_VALUE, *_PRODUCTS)}
#: Below FP16's largest value, 2^16, by as much as a convolution's transforms may add.
LARGEST_GRADIENT = 2.0**12


def stays_finite(module: nn.Module) -> bool:
    """Return whether a module certainly returns finite values whenever it is given finite ones."""
    return type(module) in VALUE_BY_VALUE and _runs_torchs_own_code(module)


def gradient_stays_finite(module: nn.Module, largest: float) -> bool:
    """Return whether a module certainly hands a finite gradient on to its input. Reads the weight of a product.

    Args:
        largest: the largest magnitude in the gradient at its output.
    """
    if not _runs_torchs_own_code(module):
        return False
    if type(module) in NO_STEEPER_THAN_1:
        return True
    weight = module._parameters.get("weight")
    if type(module) not in _PRODUCTS or weight is None or not weight.numel():
        return False
    of_weight = largest_magnitude(weight)
    # A sum over output channels, and over a convolution's taps, in any order. Where autocast computes it in FP16, in that.
    terms = weight.numel() // weight.shape[1]
    return of_weight is not None and terms * largest * of_weight <= LARGEST_GRADIENT


def _runs_torchs_own_code(module: nn.Module) -> bool:
    """Return whether what goes in and out is made by the forward that torch gave its class, and by no hook but ours."""
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        "forward" not in vars(module)
        and type(module).forward is _FORWARDS.get(type(module))
        and not global_hooks._global_forward_hooks
        and not any(others)
        and all(isinstance(hook, ModelHook) for hook in module._forward_hooks.values())
    )
