"""Run or record attention and recurrent layers as one operator, as a GPU does, where another device decomposes them.

The choice of CUDA's attention kernel follows ``_fused_sdp_choice_cuda`` in ``ATen/native/transformers/cuda/sdp_utils.cpp``:
flash before memory-efficient before math, each if its conditions hold and its flag in ``torch.backends.cuda`` is set, as
``torch.nn.attention.sdpa_kernel`` sets it. The conditions here hold for Ampere and later.

A CPU chooses by other conditions (with dropout it takes the math path, for example). There the call runs unchanged, and the
recorder replaces its products by the operator that CUDA would choose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from mpinspect.runtime.emulation.autocast_policies import ELIGIBLE, ThreadKernels
from mpinspect.shapes.operators.attention import fused_operators
from mpinspect.shapes.records import Matmul, Operand

aten = torch.ops.aten

#: cudnnRNNMode_t (ATen/native/cudnn/RNN.cpp).
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_HALF = (torch.float16, torch.bfloat16)
_HALF_NAMES = ("float16", "bfloat16")
_LARGEST_FLASH_HEAD = 256
#: The multiple that the memory-efficient kernels need of a head's size, by dtype; 4 for FP32.
_ALIGNMENT = dict.fromkeys(_HALF_NAMES, 8)


class _Names(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPES = _Names()


def operand(tensor: Any) -> Operand | None:
    """Return a tensor's shape, strides, dtype and offset; None for tensors without strides (sparse, nested), and no tensors."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return Operand(tuple(tensor.shape), tensor.stride(), _DTYPES[tensor.dtype], int(tensor.storage_offset()))


# -- attention -----------------------------------------------------------------------------------------------------------


@dataclass
class Attended:
    """One call of scaled_dot_product_attention as CUDA would compute it.

    Args:
        why: why CUDA would take its math path: one of MATH_PATHS; "" if it would take a fused operator.
        operators: the records of the fused operator's forward and backward; () if this device runs the same operator as CUDA.
        module: id of the module that made the call.
        autocast: as in Matmul.
        first, last: sequence numbers of the first autograd node of the call, and of the first one after it.
        backwards: the backward passes (ids of torch's graph tasks) that were recorded.
    """

    why: str = ""
    operators: tuple[Matmul, ...] = ()
    module: int = 0
    autocast: bool | None = None
    is_recorded: bool = False
    first: int = 0
    last: int = 0
    backwards: set[int] = field(default_factory=set)


class _Running(threading.local):
    """The call of scaled_dot_product_attention that this thread is running; between calls one without operators."""

    call = Attended()


_running = _Running()


def running_attention() -> Attended:
    """Return the call of scaled_dot_product_attention whose operators this thread is running.

    Between calls, the result has no operators and no reason for a math path.
    """
    return _running.call


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
    operands = [operand(one) for one in (query, key, value)]
    mask = operand(attn_mask)
    if not query.is_meta:
        with _recorded_as(_on_cuda(operands, mask, is_causal, enable_gqa)):
            return operation(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    backend, why = _choice(operands, mask, enable_gqa)
    if backend == "flash":
        attended = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif backend in ("efficient", "cudnn"):
        run = getattr(aten, f"_scaled_dot_product_{backend}_attention")
        bias = _bias(attn_mask, query, key)
        attended = run(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)
    else:
        with _recorded_as(Attended(why)):
            attended = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    return attended[0]  # type: ignore[no-any-return]


@contextmanager
def _recorded_as(call: Attended) -> Iterator[None]:
    before, _running.call = _running.call, call
    call.first = _get_sequence_nr()
    try:
        yield
    finally:
        call.last = _get_sequence_nr()
        _running.call = before


def _on_cuda(operands: Sequence[Operand | None], mask: Operand | None, is_causal: bool, grouped: bool) -> Attended:
    """Return how CUDA would compute attention on these operands."""
    backend, why = _choice(operands, mask, grouped)
    query, key, value = operands
    if backend == "math" or query is None or key is None or value is None:
        return Attended(why)
    bias = _expanded(mask, (*query.shape[:-1], key.shape[-2]), query.dtype)
    return Attended(operators=fused_operators(backend, (query, key, value), bias, is_causal))


def _choice(operands: Sequence[Operand | None], mask: Operand | None, grouped: bool) -> tuple[str, str]:
    """Return the backend that CUDA chooses ("flash", "efficient", "cudnn" or "math"), and for "math" one of MATH_PATHS."""
    query, key, value = operands
    if query is None or key is None or value is None:
        return "math", "dimensions"
    backend = _backend(query, key, value, mask, grouped)
    if backend == "math":
        return backend, _why_math(query, key, value, mask, grouped)
    return backend, ""


def _backend(query: Operand, key: Operand, value: Operand, mask: Operand | None, grouped: bool) -> str:
    if not _fusible(query, key, value, grouped):
        return "math"
    allowed: Any = torch.backends.cuda
    half, head = query.dtype in _HALF_NAMES, query.shape[-1]
    same_head = head == key.shape[-1] == value.shape[-1]
    if allowed.flash_sdp_enabled() and half and mask is None and same_head and head <= _LARGEST_FLASH_HEAD:
        return "flash"
    alignment = _ALIGNMENT.get(query.dtype, 4)
    heads_fit = query.shape[1] == key.shape[1]
    if allowed.mem_efficient_sdp_enabled() and heads_fit:
        aligned = head % alignment == 0 and value.shape[-1] % alignment == 0
        if aligned and (half or query.dtype == "float32"):
            return "efficient"
    if allowed.cudnn_sdp_enabled() and half and head % 8 == 0 and head <= 128 and same_head:
        return "cudnn"
    return "math"


def _why_math(query: Operand, key: Operand, value: Operand, mask: Operand | None, grouped: bool) -> str:
    if not (len(query.shape) == len(key.shape) == len(value.shape) == 4):
        return "dimensions"
    if any(_last_stride(one) != 1 for one in (query, key, value)):
        return "strides"
    if not _fusible(query, key, value, grouped):
        return "shapes"
    if query.dtype not in (*_HALF_NAMES, "float32"):
        return "dtype"
    # With every switch on, operands with another head size, or with as many key heads as query heads, would be fused.
    alignment = _ALIGNMENT.get(query.dtype, 4)
    heads_fit = query.shape[1] == key.shape[1]
    odd = query.shape[-1] % alignment or value.shape[-1] % alignment
    allowed: Any = torch.backends.cuda
    if heads_fit and odd and allowed.mem_efficient_sdp_enabled():
        return "head-size"
    if not heads_fit and (query.dtype == "float32" or mask is not None):
        return "shapes"
    return "disabled"


def _fusible(query: Operand, key: Operand, value: Operand, grouped: bool) -> bool:
    if not (len(query.shape) == len(key.shape) == len(value.shape) == 4):
        return False
    if not (query.dtype == key.dtype == value.dtype):
        return False
    if 0 in (query.shape[2], key.shape[2]) or any(_last_stride(one) != 1 for one in (query, key, value)):
        return False
    heads = query.shape[1] == key.shape[1] or (grouped and key.shape[1] and query.shape[1] % key.shape[1] == 0)
    return bool(heads) and query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]


def _last_stride(one: Operand) -> int:
    return (one.strides or (1,))[-1]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as it is added to the scores: a bool mask is cast to the query's dtype."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = mask.to(query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _expanded(mask: Operand | None, shape: tuple[int, ...], dtype: str) -> Operand | None:
    """Return a mask's memory layout as it is added to scores of this shape."""
    if mask is None:
        return None
    missing = len(shape) - len(mask.shape)
    kept = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.strides or (), strict=True)]
    return Operand(shape, (*[0] * missing, *kept), dtype, mask.offset)


# -- attention of a training step on a CPU ---------------------------------------------------------------------------------

_OBSERVING = ThreadKernels("AutocastHPU")


def observe_attention(wanted: bool) -> None:
    """Begin or end describing this thread's calls of scaled_dot_product_attention, which run unchanged."""
    _OBSERVING.use(*[{"scaled_dot_product_attention": _observed}] * wanted)


def _observed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        call = _described(*args, **kwargs)
    except Exception:  # the operator itself raises for arguments that do not fit, and must run in any case
        call = Attended()
    with _recorded_as(call):
        return operation(*args, **kwargs)


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """Return how CUDA would compute a call that autocast has not cast yet."""
    return _on_cuda([_cast(query), _cast(key), _cast(value)], _cast(attn_mask), is_causal, enable_gqa)


def _cast(tensor: torch.Tensor | None) -> Operand | None:
    found = operand(tensor)
    if tensor is None or found is None or tensor.dtype not in ELIGIBLE or not torch.is_autocast_enabled("cpu"):
        return found
    return replace(found, dtype=_DTYPES[torch.get_autocast_dtype("cpu")])


# -- recurrent layers ----------------------------------------------------------------------------------------------------


def _recurrent(name: str, packed: bool) -> Callable[..., Any]:
    def run(operation: Any, x: torch.Tensor, *args: Any) -> Any:
        if not x.is_meta or x.dtype not in (*_HALF, torch.float32, torch.float64):
            return operation(x, *args)
        batch_sizes = []
        if packed:
            batch_sizes, args = args[0].tolist(), args[1:]
        states, weights, *rest = args
        return _cudnn_rnn(_MODES[name], x, batch_sizes, states, weights, *rest)

    return run


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
    hidden = projection = hx.shape[2]
    if cx is not None:
        hidden = cx.shape[2]
    if projection == hidden:
        projection = 0
    stride = len(weights) // (layers * (1 + bidirectional))
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
