"""LayerNorm, GroupNorm, RMSNorm and InstanceNorm of half inputs, with FP32 statistics and nothing in FP32 kept for the backward.

Autocast runs these layers in FP32 and keeps the FP32 copy of their input for the backward: twice the memory of the half
input. torch's own half kernels keep the half input, but most of them keep the mean and 1/deviation in half too, in ATen's
``native_group_norm`` on every device and ``native_layer_norm`` on a CPU: for an input of mean 30000 and deviation 20 the
gradient is then off by several per cent. And ``rms_norm``, where it has no fused kernel, keeps three FP32 tensors.

So the layers here compute in FP32, round the result, keep their half arguments, and compute once more in the backward.
Where torch's own kernel keeps half inputs and FP32 statistics it is used: LayerNorm on a GPU, RMSNorm there since torch 2.9.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from mpinspect.training.recompute import recomputed

_HALVES = (torch.float16, torch.bfloat16)
_FUSED_RMS_NORM = torch.__version__ >= (2, 9)  # type: ignore[operator]


class HalfLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        function = partial(_layer_norm, self.normalized_shape, self.eps)
        return _normalise(function, input, self.weight, self.bias, fused=input.is_cuda)


class HalfGroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalise(partial(_group_norm, self.num_groups, self.eps), input, self.weight, self.bias, fused=False)


class HalfRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` for half weights: half in, half out, also under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = partial(_rms_norm, self.normalized_shape, self.eps)
        return _normalise(function, x, self.weight, None, fused=x.is_cuda and _FUSED_RMS_NORM)


class _UnitWeight(nn.modules.instancenorm._InstanceNorm):
    """Gives ATen an FP32 weight of ones where a layer has none: without one the statistics would be half."""

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
    """Turn torch's own LayerNorm, GroupNorm, RMSNorm and InstanceNorm into the ones above, in place.

    They are the same objects with another class, derived from the one they had; parameters and hooks stay. Classes that
    others derived from torch's may compute something else and are left alone.
    """
    for module in model.modules():
        if type(module) in _SWAPS:
            module.__class__ = _SWAPS[type(module)]


def _layer_norm(
    shape: tuple[int, ...], eps: float, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _group_norm(
    groups: int, eps: float, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _rms_norm(
    shape: tuple[int, ...], eps: float | None, x: torch.Tensor, weight: torch.Tensor | None, bias: None
) -> torch.Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _normalise(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fused: bool,
) -> torch.Tensor:
    """``function(x, weight, bias)`` in the dtype of the weight, or of ``x`` where there is none; ``fused``: as it is."""
    dtype = x.dtype if weight is None else weight.dtype
    with torch.autocast(x.device.type, enabled=False):
        if fused or dtype not in _HALVES:
            return function(x.to(dtype), weight, bias)
        if torch.compiler.is_compiling():  # the compiler decides itself what to keep, and keeps the smaller
            return _rounded(function, x.to(dtype), weight, bias)
        return recomputed(partial(_rounded, function), x.to(dtype), weight, bias)


def _rounded(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    full = (None if tensor is None else tensor.float() for tensor in (x, weight, bias))
    return function(*full).to(x.dtype)
