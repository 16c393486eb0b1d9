"""Run attention and recurrent layers as one operator, as a GPU does, where the meta device would decompose them.

The choice of CUDA's attention kernel follows ``_fused_sdp_choice_cuda`` in ``ATen/native/transformers/cuda/sdp_utils.cpp``:
flash before memory-efficient before math, each if its conditions hold and its flag in ``torch.backends.cuda`` is set, as
``torch.nn.attention.sdpa_kernel`` sets it. The conditions here are those of Ampere and later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

aten = torch.ops.aten

#: cudnnRNNMode_t (ATen/native/cudnn/RNN.cpp).
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256


def attention(
    operation: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run scaled_dot_product_attention: on meta tensors with the operator that CUDA would choose, on others unchanged."""
    backend = sdpa_backend(query, key, value, attn_mask, enable_gqa)
    why = why_math(query, key, value, attn_mask, enable_gqa) if backend == "math" else ""
    if not query.is_meta:
        with _on_math_path(why):
            return operation(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if backend == "flash":
        attended = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif backend in ("efficient", "cudnn"):
        run = getattr(aten, f"_scaled_dot_product_{backend}_attention")
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        attended = run(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)
    else:
        with _on_math_path(why):
            attended = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    return attended[0]  # type: ignore[no-any-return]


def sdpa_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> str:
    """Return the backend that CUDA chooses for these operands: "flash", "efficient", "cudnn" or "math"."""
    if not _fusible(query, key, value, grouped):
        return "math"
    allowed: Any = torch.backends.cuda
    half, head = query.dtype in _HALF, query.shape[-1]
    same_head = head == key.shape[-1] == value.shape[-1]
    if allowed.flash_sdp_enabled() and half and mask is None and same_head and head <= _LARGEST_FLASH_HEAD:
        return "flash"
    alignment = 8 if half else 4
    heads_fit = query.shape[1] == key.shape[1]
    if allowed.mem_efficient_sdp_enabled() and heads_fit:
        aligned = head % alignment == 0 and value.shape[-1] % alignment == 0
        if aligned and (half or query.dtype == torch.float32):
            return "efficient"
    if allowed.cudnn_sdp_enabled() and half and head % 8 == 0 and head <= 128 and same_head:
        return "cudnn"
    return "math"


def why_math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> str:
    """Return why CUDA computes attention on these operands by the math path: one of MATH_PATHS."""
    if not (query.dim() == key.dim() == value.dim() == 4):
        return "dimensions"
    if any(one.stride(-1) != 1 for one in (query, key, value)):
        return "strides"
    if not _fusible(query, key, value, grouped):
        return "shapes"
    if query.dtype not in (*_HALF, torch.float32):
        return "dtype"
    # With every switch on, operands with another head size, or with as many key heads as query heads, would be fused.
    alignment = 8 if query.dtype in _HALF else 4
    heads_fit = query.shape[1] == key.shape[1]
    if heads_fit and (query.shape[-1] % alignment or value.shape[-1] % alignment):
        allowed: Any = torch.backends.cuda
        return "head-size" if allowed.mem_efficient_sdp_enabled() else "disabled"
    if not heads_fit and (query.dtype == torch.float32 or mask is not None):
        return "shapes"
    return "disabled"


class _MathPath(threading.local):
    """The reason why this thread is computing attention by the math path; "" while it is not."""

    why: str = ""


_math_path = _MathPath()


def math_path() -> str:
    """Return why the running operator is part of torch's unfused attention: one of MATH_PATHS; "" if it is not part of it."""
    return _math_path.why


@contextmanager
def _on_math_path(why: str) -> Iterator[None]:
    before, _math_path.why = _math_path.why, why
    try:
        yield
    finally:
        _math_path.why = before


def _fusible(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    if not (query.dim() == key.dim() == value.dim() == 4) or not (query.dtype == key.dtype == value.dtype):
        return False
    if 0 in (query.shape[2], key.shape[2]) or any(one.stride(-1) != 1 for one in (query, key, value)):
        return False
    heads = query.shape[1] == key.shape[1] or (grouped and key.shape[1] and query.shape[1] % key.shape[1] == 0)
    return bool(heads) and query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask as it is added to the scores: a bool mask is cast to the query's dtype."""
    added = mask.to(query.dtype) if mask.dtype == torch.bool else mask
    return added.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# -- recurrent layers ----------------------------------------------------------------------------------------------------


def _recurrent(name: str, packed: bool) -> Callable[..., Any]:
    def run(operation: Any, x: torch.Tensor, *args: Any) -> Any:
        if not x.is_meta or not _fits_cudnn(x):
            return operation(x, *args)
        batch_sizes = args[0].tolist() if packed else []
        states, weights, *rest = args[1:] if packed else args
        return _cudnn_rnn(_MODES[name], x, batch_sizes, states, weights, *rest)

    return run


def _fits_cudnn(x: torch.Tensor) -> bool:
    return x.dtype in (*_HALF, torch.float32, torch.float64)


def _cudnn_rnn(
    mode: int,
    x: torch.Tensor,
    batch_sizes: Sequence[int],
    states: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[torch.Tensor, ...]:
    hx, cx = states if isinstance(states, (list, tuple)) else (states, None)
    hidden = hx.shape[2] if cx is None else cx.shape[2]
    projection = hx.shape[2] if hx.shape[2] != hidden else 0
    stride = len(weights) // (layers * (2 if bidirectional else 1))
    sizes = (mode, hidden, projection, layers, batch_first, dropout, train, bidirectional, batch_sizes, None)
    output, hy, cy, _, _ = aten._cudnn_rnn(x, weights, stride, x.new_empty(0), hx, cx, *sizes)
    return (output, hy) if cx is None else (output, hy, cy)


#: The functions that replace an operator, by overload; each is called with the operator itself and its arguments.
FUSED: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    **{
        f"{name}.{overload}": _recurrent(name, packed)
        for name in _MODES
        for overload, packed in (("input", False), ("data", True))
    },
}
