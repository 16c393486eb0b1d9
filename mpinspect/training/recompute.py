"""Functions that save only their arguments for the backward, and recompute their FP32 intermediates there.

Used for norms, and for the cross-entropy of half logits, since autocast would save an FP32 copy of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def recomputed(function: Callable[..., torch.Tensor], *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return ``function(*tensors)``, saving only the tensors and recomputing the function in the backward; no autocast.

    The function must depend on the tensors alone and have no side effects. Its result can be differentiated twice.
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
            # Views, because hooks on the tensors themselves would run on this function's share of the gradient.
            tensors = [tensor if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            result = _without_autocast(ctx.function, tensors)
        inputs = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want and tensor is not None]
        gradients = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
        return (None, *(next(gradients) if want else None for want in wanted))


def _without_autocast(function: Callable[..., torch.Tensor], tensors: Any) -> torch.Tensor:
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    with torch.autocast(device, enabled=False):
        return function(*tensors)


_HALVES = (torch.float16, torch.bfloat16)


class LeanCrossEntropy(TorchFunctionMode):
    """Makes ``F.cross_entropy`` (and ``nn.CrossEntropyLoss``) of half logits under autocast save no FP32 tensors.

    FP32 logits are handled as usual, and so is code under torch.compile, which chooses itself what to save.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, *rest: Any, **options: Any
) -> torch.Tensor:
    lean = input.dtype in _HALVES and torch.is_autocast_enabled(input.device.type)
    if not lean or torch.compiler.is_compiling():
        return F.cross_entropy(input, target, weight, *rest, **options)
    return recomputed(partial(_in_float32, rest, options), input, target, weight)


def _in_float32(
    rest: tuple[Any, ...],
    options: dict[str, Any],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    if target.is_floating_point():
        target = target.float()
    return F.cross_entropy(input.float(), target, _full(weight), *rest, **options)


def _full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


_FUSED_RMS_NORM = torch.__version__ >= (2, 9)  # type: ignore[operator]


class HalfLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape, eps = self.normalized_shape, self.eps
        return _normalise(
            lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps),
            input,
            self.weight,
            self.bias,
            fused=input.is_cuda,
        )


class HalfGroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        groups, eps = self.num_groups, self.eps
        return _normalise(
            lambda x, weight, bias: F.group_norm(x, groups, weight, bias, eps),
            input,
            self.weight,
            self.bias,
            fused=False,
        )


class HalfRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, eps = self.normalized_shape, self.eps
        fused = x.is_cuda and _FUSED_RMS_NORM
        return _normalise(lambda x, weight, _: F.rms_norm(x, shape, weight, eps), x, self.weight, None, fused=fused)


class _UnitWeight(nn.modules.instancenorm._InstanceNorm):
    """InstanceNorm that passes ATen an FP32 weight of ones in place of a missing one, so that the statistics are FP32."""

    def _apply_instance_norm(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight is None and input.dtype in _HALVES:
            weight = input.new_ones(self.num_features, dtype=torch.float32)
        batch_statistics = self.training or not self.track_running_stats
        statistics = (self.running_mean, self.running_var)
        return F.instance_norm(input, *statistics, weight, self.bias, batch_statistics, self.momentum or 0.0, self.eps)


class HalfInstanceNorm1d(_UnitWeight, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` for half inputs; its own weights and statistics stay FP32."""


class HalfInstanceNorm2d(_UnitWeight, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` for half inputs; its own weights and statistics stay FP32."""


class HalfInstanceNorm3d(_UnitWeight, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` for half inputs; its own weights and statistics stay FP32."""


_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.InstanceNorm1d: HalfInstanceNorm1d,
    nn.InstanceNorm2d: HalfInstanceNorm2d,
    nn.InstanceNorm3d: HalfInstanceNorm3d,
    nn.LayerNorm: HalfLayerNorm,
    nn.GroupNorm: HalfGroupNorm,
    nn.RMSNorm: HalfRMSNorm,
}


def use_half_norms(model: nn.Module) -> None:
    """Turn torch's own LayerNorm, GroupNorm, RMSNorm and InstanceNorm modules into the classes above, in place.

    Each module stays the same object and changes only its class, to a subclass of its own; parameters and hooks stay.
    User-defined subclasses of torch's norms may compute something else and are not changed.
    """
    for module in model.modules():
        if type(module) in _SWAPS:
            module.__class__ = _SWAPS[type(module)]


def _normalise(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fused: bool,
) -> torch.Tensor:
    """Return ``function(x, weight, bias)`` in the dtype of the weight (of ``x`` without one), computed in FP32.

    With ``fused``, the function is called directly on half tensors.
    """
    dtype = x.dtype if weight is None else weight.dtype
    with torch.autocast(x.device.type, enabled=False):
        if fused or dtype not in _HALVES:
            return function(x.to(dtype), weight, bias)
        if torch.compiler.is_compiling():  # the compiler decides itself what to save, and saves the smaller tensor
            return _rounded(function, x.to(dtype), weight, bias)
        return recomputed(partial(_rounded, function), x.to(dtype), weight, bias)


def _rounded(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return function(*map(_full, (x, weight, bias))).to(x.dtype)
