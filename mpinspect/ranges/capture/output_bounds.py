"""What no magnitude in a module's output can exceed, told from what went in: what is certainly finite need not be read.

Modules that compute |f(x)| <= max(|x|, 1), value by value, keep the bound of their input. Linear layers and convolutions add up
so many terms: at most terms * max|x| * max|weight| + max|bias|, and a weight is read faster than a far larger output.

That is certain only while a module runs torch's own code and nothing else can change what it returns, so both are asked at
each call. Where it is not certain, or the bound comes near the largest value, the output is read. Memory that is written to
round its version (``.data``, NumPy) passes for what it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from mpinspect.counting.magnitude import largest_magnitude
from mpinspect.runtime.hooks import ModelHook

_VALUE_BY_VALUE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softsign),
    *(nn.Flatten, nn.Unflatten, nn.Identity),
)
#: Each with the function of torch.nn.functional that it calls.
_PRODUCTS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
}
#: What was there when this was imported: a forward, or a function, that is replaced later is unknown code.
_KINDS: tuple[Any, ...] = (*_VALUE_BY_VALUE, *_PRODUCTS)
_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in _KINDS}
_FUNCTIONS = {name: getattr(F, name) for name in (*_PRODUCTS.values(), "pad")}
#: What a convolution's forward calls.
_CONVOLVE = "_conv_forward"
_CONVOLUTIONS = {kind: vars(kind).get(_CONVOLVE) for kind in _PRODUCTS}

#: Some compute powers of x on their way, the third at most: within the fourth root of the largest value nothing overflows.
_LARGEST = {
    dtype: torch.finfo(dtype).max ** 0.25 for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
#: Far enough below the largest value for whatever a product's algorithm does on its way (Winograd's transforms, sums in another
#: order, operands rounded to BF16). FP16 has no such room: its products are read.
_LARGEST_OF_PRODUCTS = {
    dtype: torch.finfo(dtype).max * 2.0**-40 for dtype in (torch.float64, torch.float32, torch.bfloat16)
}
#: Their gradient is at most that at their output. (GELU's and SiLU's may compute infinity times zero of large values.)
_NO_STEEPER_THAN_1 = (nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Flatten, nn.Unflatten, nn.Identity)
#: Below FP16's largest value, 2^16, by as much as a convolution's transforms may add.
_LARGEST_GRADIENT = 2.0**12
#: A smaller output, or one that is less than so many times the weight, is read in no more time.
_LEAST_PRODUCT, _LEAST_TIMES_WEIGHT = 1 << 15, 2


def may_bound(module: nn.Module) -> bool:
    """Whether the module is of a kind whose output ``output_bound`` knows something about."""
    return type(module) in _FORWARDS


def output_bound(module: nn.Module, output: torch.Tensor, largest: float) -> float | None:
    """What no magnitude in ``output``, which the module has just returned, exceeds but by rounding; None where it is not certain.

    Args:
        module: one of those that ``may_bound``, with one forward hook of ours.
        largest: what no magnitude exceeds in what went in, 1 or more, finite.
    """
    if len(module._forward_hooks) != 1 or not _runs_torchs_own(module):
        return None
    function = _PRODUCTS.get(type(module))
    if function is not None:
        return _of_product(module, function, output, largest)
    return largest if largest <= _LARGEST.get(output.dtype, 0.0) else None


def stays_finite(module: nn.Module) -> bool:
    """Whether a module returns finite values whenever it is given finite ones."""
    return type(module) in _VALUE_BY_VALUE and _only_our_hooks(module) and _runs_torchs_own(module)


def gradient_stays_finite(module: nn.Module, largest: float) -> bool:
    """Whether a module is certain to hand a finite gradient on to its input.

    Reads the weight of linear layers and convolutions.

    Args:
        largest: what no magnitude exceeds in the gradient at its output.
    """
    if not _only_our_hooks(module) or not _runs_torchs_own(module):
        return False
    if type(module) in _NO_STEEPER_THAN_1:
        return True
    weight = module._parameters.get("weight")
    if type(module) not in _PRODUCTS or weight is None or not weight.numel():
        return False
    of_weight = largest_magnitude(weight)
    # A sum over output channels, and over a convolution's taps, in any order. Where autocast computes it in FP16, in that.
    terms = weight.numel() // weight.shape[1]
    return of_weight is not None and terms * largest * of_weight <= _LARGEST_GRADIENT


def _runs_torchs_own(module: nn.Module) -> bool:
    """Whether what the module returns is made by the forward that torch gave its class, and by no hook on all modules."""
    return (
        "forward" not in vars(module)
        and type(module).forward is _FORWARDS.get(type(module))
        and not global_hooks._global_forward_hooks
    )


def _only_our_hooks(module: nn.Module) -> bool:
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(others) and all(isinstance(hook, ModelHook) for hook in module._forward_hooks.values())


def _of_product(module: nn.Module, function: str, output: torch.Tensor, largest: float) -> float | None:
    """The bound of a product's output, which costs one reading of the weight."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    most = _LARGEST_OF_PRODUCTS.get(output.dtype, 0.0)
    if (
        weight is None
        # One that somebody computes at every call is registered no more; none at all is registered as None.
        or "bias" not in module._parameters
        or output.numel() < max(_LEAST_TIMES_WEIGHT * weight.numel(), _LEAST_PRODUCT)
        or weight.dtype not in _LARGEST_OF_PRODUCTS
        or getattr(F, function) is not _FUNCTIONS[function]
        or F.pad is not _FUNCTIONS["pad"]
        or _CONVOLVE in vars(module)
        or vars(type(module)).get(_CONVOLVE) is not _CONVOLUTIONS[type(module)]
        # A mode of somebody's may compute anything instead.
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    of_weight, of_bias = largest_magnitude(weight), 0.0 if bias is None else largest_magnitude(bias)
    if of_weight is None or of_bias is None:
        return None
    terms = weight.numel() // weight.shape[0]
    bound = terms * largest * of_weight + of_bias
    # Of a NaN neither is true.
    return bound if bound <= most and max(largest, of_weight) <= most else None
