"""Modules that cannot have made an infinity or NaN, judged by their type and, for linear and convolution layers, their weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from mpinspect.ranges.capture.largest import is_plain, read_largest
from mpinspect.runtime.hooks import ModelHook

#: Elementwise (or reshaping) modules with |f(x)| <= max(|x|, 1). (GELU doubles x on the way where a processor has AVX-512.)
VALUE_BY_VALUE: tuple[type[Any], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softsign),
    *(nn.Flatten, nn.Unflatten, nn.Identity),
)
#: Modules whose input gradient is at most their output gradient. (SiLU may compute infinity times 0 for large inputs.)
NO_STEEPER_THAN_1 = (nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Flatten, nn.Unflatten, nn.Identity)
_PRODUCTS: tuple[type[Any], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The forward methods of these classes at import: a forward that is replaced later is unknown code.
_FORWARDS: dict[type[Any], Any] = {kind: kind.forward for kind in (*VALUE_BY_VALUE, *_PRODUCTS)}
#: The limit for a gradient: below FP16's range, 2^16, with a margin for the transforms in a convolution.
LARGEST_GRADIENT = 2.0**12


def stays_finite(module: nn.Module) -> bool:
    """Return whether a module's outputs are certain to be finite if its inputs are."""
    return type(module) in VALUE_BY_VALUE and _runs_torchs_own_code(module)


def gradient_stays_finite(module: nn.Module, largest: float) -> bool:
    """Return whether the gradient of a module's input is certain to be finite. Reads the weight of a linear or convolution layer.

    Args:
        module: the module.
        largest: the largest magnitude in the gradient of its output.
    """
    if not _runs_torchs_own_code(module):
        return False
    if type(module) in NO_STEEPER_THAN_1:
        return True
    weight = module._parameters.get("weight")
    # A weight on a GPU would have to be waited for.
    if type(module) not in _PRODUCTS or not is_plain(weight) or not weight.is_cpu:
        return False
    # Each element of the input gradient is a sum over output channels and a convolution's taps, in any order; autocast may
    # compute it in FP16.
    terms = weight.numel() // weight.shape[1]
    return terms * largest * abs(read_largest(weight)) <= LARGEST_GRADIENT


def _runs_torchs_own_code(module: nn.Module) -> bool:
    """Return whether the module runs its class's original torch forward, with no hooks other than this package's."""
    # The recorder of shapes puts hooks before the forward for one step.
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return (
        "forward" not in vars(module)
        and type(module).forward is _FORWARDS.get(type(module))
        and not global_hooks._global_forward_hooks
        and all(isinstance(hook, ModelHook) for each in hooks for hook in each.values())
    )
