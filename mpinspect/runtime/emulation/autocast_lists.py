"""Applies CUDA's autocast lists, of operations in FP16, in FP32 or in the widest operand's dtype, to CPU tensors.

Like CUDA's autocast, this module works in torch's dispatcher, under the names of CUDA's lists (``ATen/autocast_mode.h``;
"Autocast Op Reference" in torch's documentation).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from mpinspect.runtime.emulation.autocast_policies import (
    CASTING,
    ELIGIBLE,
    Policy,
    cast_all,
    float32,
    float32_by_default,
    where_enabled,
    widest,
)

#: Operations that run in autocast's 16-bit dtype, without those also in the CPU's list (``mm``, ``conv2d``, ...).
LOWER = """
    convolution _convolution prelu addmv addr mv einsum chain_matmul linalg_multi_dot
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
#: Recurrent layers: on CUDA the cast happens in cuDNN's operation inside these.
RECURRENT = """
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
"""
#: Operations that run in FP32.
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    layer_norm native_layer_norm rms_norm group_norm
    norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim renorm dist pdist cdist logsumexp
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits linalg_matrix_sqrth
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
#: Operations with an FP32 result unless the caller passes a dtype.
FLOAT32_BY_DEFAULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList
    linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
"""
#: Operations that run in the widest dtype of their operands.
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
#: Operations that CPU autocast runs in FP32 and CUDA in the input's dtype; here in FP32, then rounded to that dtype.
AS_THEY_COME = """
    avg_pool3d adaptive_avg_pool3d max_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    grid_sampler_2d grid_sampler_3d trace
"""


def cuda_autocast_lists() -> AbstractContextManager[None]:
    """Make the CPU's autocast, where enabled, follow CUDA's lists within the block, in this thread only."""
    return CASTING.running(_policies())


# -- the kernels -----------------------------------------------------------------------------------------------------------


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype in ELIGIBLE


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_eligible(value) else value


def _lower(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operation(*cast_all(args, torch.get_autocast_dtype("cpu"), _cast), **kwargs)


def _as_they_come(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = _float32(operation, args, kwargs)
    if not _is_eligible(args[0]):
        return made
    if isinstance(made, torch.Tensor):
        return made.to(args[0].dtype)
    return tuple(_cast(value, args[0].dtype) for value in made)


_float32 = float32(_cast)

_LISTS: list[tuple[str, Policy]] = [
    (LOWER, _lower),
    (RECURRENT, _lower),
    (FLOAT32, _float32),
    (FLOAT32_BY_DEFAULT, float32_by_default(_is_eligible)),
    (WIDEST, widest(_cast, _is_eligible, "cpu")),
    (AS_THEY_COME, _as_they_come),
]


@cache
def _policies() -> dict[str, Policy]:
    """Return a policy for each operation that the CPU's own autocast casts to another dtype in this version of torch."""
    cuda, cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in ("AutocastCUDA", "AutocastCPU")
    )
    found = {}
    for names, policy in _LISTS:
        for name in names.split():
            is_in_cpus_list = f"aten::{name}" in cpu
            if policy is _as_they_come:
                wanted = is_in_cpus_list
            elif names is RECURRENT:
                wanted = True
            else:
                # torch's own CPU kernel suffices if both cast to the same dtype.
                wanted = f"aten::{name}" in cuda and not (policy in (_lower, _float32) and is_in_cpus_list)
            if wanted:
                found[name] = where_enabled("cpu", policy)
    return found
