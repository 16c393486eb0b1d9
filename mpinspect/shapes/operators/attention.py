"""Describe scaled dot-product attention in one operator, and its backward, as one record.

m, n and k are queries, keys and head_dim; ``batch`` is batch x heads. FLOPs count both products (scores, and
scores x values) over all scores, masked or not; the backward computes five products, recomputing the scores
(FlashAttention-2, arXiv 2307.08691, section 2.3; torch/utils/flop_counter.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpinspect.shapes.operators.call import Call, UnknownSizesError, fresh, traffic, transposed
from mpinspect.shapes.records import Attention, Matmul, Operand


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of an operator's arguments.

    Args:
        backend: the value of Attention.backend.
        bias, is_causal: positions of these arguments; None if the operator has no such argument.
        heads_last: whether tensors are (batch, length, heads, dim) instead of (batch, heads, length, dim).
        lengths: positions of the sequences' starts (packed sequences: no batch dimension), the longest query and longest key.
        backward: the arguments begin with grad_out.
    """

    backend: str
    bias: int | None = None
    is_causal: int | None = None
    heads_last: bool = False
    lengths: tuple[int, int, int] | None = None
    backward: bool = False


_LAYOUTS: dict[str, _Layout] = {
    "scaled_dot_product_attention": _Layout("", bias=3, is_causal=5),
    "_scaled_dot_product_attention_math": _Layout("math", bias=3, is_causal=5),
    "_scaled_dot_product_flash_attention": _Layout("flash", is_causal=4),
    "_scaled_dot_product_flash_attention_for_cpu": _Layout("flash", bias=5, is_causal=4),
    "_scaled_dot_product_efficient_attention": _Layout("efficient", bias=3, is_causal=6),
    "_scaled_dot_product_cudnn_attention": _Layout("cudnn", bias=3, is_causal=6),
    "_scaled_dot_product_fused_attention_overrideable": _Layout("", bias=3, is_causal=5),
    "_flash_attention_forward": _Layout("flash", is_causal=8, heads_last=True, lengths=(3, 5, 6)),
    "_efficient_attention_forward": _Layout("efficient", bias=3, heads_last=True, lengths=(4, 6, 7)),
    "_cudnn_attention_forward": _Layout("cudnn", bias=3, is_causal=10),
    "_scaled_dot_product_flash_attention_backward": _Layout("flash", is_causal=11, backward=True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _Layout("flash", bias=8, is_causal=7, backward=True),
    "_scaled_dot_product_efficient_attention_backward": _Layout("efficient", bias=4, is_causal=11, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": _Layout("cudnn", bias=8, is_causal=14, backward=True),
    "_scaled_dot_product_fused_attention_overrideable_backward": _Layout("", bias=4, is_causal=13, backward=True),
    "_flash_attention_backward": _Layout("flash", is_causal=11, heads_last=True, lengths=(6, 8, 9), backward=True),
    "_efficient_attention_backward": _Layout("efficient", bias=4, heads_last=True, lengths=(6, 8, 9), backward=True),
    "_cudnn_attention_backward": _Layout("cudnn", bias=8, is_causal=14, backward=True),
}


def attention(call: Call) -> tuple[Matmul, ...]:
    """Return the record of any attention operator, forward or backward."""
    layout = _LAYOUTS[call.op.partition("::")[2]]
    role, first, of_heads, of_values = ("backward", 1, 3, 2) if layout.backward else ("forward", 0, 1, 1)
    query, key, value = (call.tensor(first + place) for place in range(3))
    geometry = _geometry(call, layout, query, key, value)
    pairs = geometry.batch * geometry.heads * geometry.queries * geometry.keys
    widths = of_heads * geometry.head_dim + of_values * geometry.value_dim
    out = call.output or fresh((*query.shape[:-1], value.shape[-1]), query.dtype)
    return (
        Matmul(
            op=call.op,
            kind="attention",
            role=role,
            m=geometry.queries,
            n=geometry.keys,
            k=geometry.head_dim,
            batch=geometry.batch * geometry.heads,
            dtype=query.dtype,
            flops=2 * pairs * widths,
            bytes=_bytes(call, layout.backward, (query, key, value), out, geometry.bias),
            a=query,
            b=transposed(key),
            out=fresh(query.shape, query.dtype) if layout.backward else out,
            attention=geometry,
        ),
    )


def fused_operators(
    backend: str, operands: tuple[Operand, Operand, Operand], bias: Operand | None, is_causal: bool
) -> tuple[Matmul, Matmul]:
    """Return the records of CUDA's fused attention on query, key and value: of the forward and of its backward.

    Args:
        backend: "flash", "efficient" or "cudnn".
    """
    query, _, value = operands
    out = fresh((*query.shape[:-1], value.shape[-1]), query.dtype)
    forward = f"_scaled_dot_product_{backend}_attention"
    calls = [_call(forward, operands, bias, is_causal), _call(f"{forward}_backward", (out, *operands), bias, is_causal)]
    first, second = (attention(call)[0] for call in calls)
    return first, second


def _call(name: str, operands: tuple[Operand, ...], bias: Operand | None, is_causal: bool) -> Call:
    """Return a call of an operator with these first arguments."""
    layout = _LAYOUTS[name]
    inputs: list[Operand | None] = [*operands, *[None] * 12]
    scalars: list[object] = [None] * len(inputs)
    if layout.bias is not None:
        inputs[layout.bias] = bias
    if layout.is_causal is not None:
        scalars[layout.is_causal] = is_causal
    return Call(f"aten::{name}", inputs, scalars, None)


#: By name without the namespace.
FAMILY: dict[str, Callable[[Call], tuple[Matmul, ...]]] = dict.fromkeys(_LAYOUTS, attention)


def _geometry(call: Call, layout: _Layout, query: Operand, key: Operand, value: Operand) -> Attention:
    bias = None
    if layout.bias is not None:
        bias = call.optional(layout.bias)
    causal = layout.is_causal is not None and call.flag(layout.is_causal)
    if call.op.endswith("_efficient_attention_forward"):
        causal = call.value(9, 0) != 0  # custom_mask_type: 0 without a mask, 1 and 2 causal from either corner
    elif call.op.endswith("_efficient_attention_backward"):
        causal = call.value(14, 0) != 0
    heads, length = (-2, -3) if layout.heads_last else (-3, -2)
    starts = call.optional(layout.lengths[0]) if layout.lengths else None
    if layout.lengths and starts is not None and len(query.shape) - (query.shape[:1] == (1,)) == 3:
        # Packed sequences, (tokens, heads, dim): each counts as long as the longest one, an upper bound.
        batch = max(next(iter(starts.shape), 0) - 1, 1)
        queries, keys = call.integer(layout.lengths[1]), call.integer(layout.lengths[2])
    else:
        if not (len(query.shape) == len(key.shape) == len(value.shape)) or len(query.shape) < 3:
            raise UnknownSizesError
        if query.shape[-1] != key.shape[-1]:
            raise UnknownSizesError
        batch, queries, keys = math.prod(query.shape[:-3]), query.shape[length], key.shape[length]
    return Attention(
        batch=batch,
        heads=query.shape[heads],
        kv_heads=key.shape[heads],
        queries=queries,
        keys=keys,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        backend=layout.backend,
        is_causal=causal,
        bias=bias,
    )


def _bytes(
    call: Call, backward: bool, operands: tuple[Operand, Operand, Operand], out: Operand, bias: Operand | None
) -> int:
    read = traffic(*operands, bias)
    if not backward:
        return read + traffic(out)
    # grad_out and the output are read (both of the same size), and three gradients are written.
    return read + 2 * traffic(call.tensor(0)) + traffic(*(fresh(one.shape, one.dtype) for one in operands))
