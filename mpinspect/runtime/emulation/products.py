"""Computes 16-bit products and convolutions in FP32, below autograd, and rounds the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpinspect.runtime.emulation import blocks

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)

#: Products as dispatched below autograd, including products inside ``linear``, ``matmul``, ``einsum`` and their gradients.
_PRODUCTS = [
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "addr",
    "dot",
    "vdot",
    "convolution",
    "convolution_backward",
]
#: Single operations below autograd that consist of several products.
_COMPOSED = [
    "conv_tbc",
    "conv_tbc_backward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_grouped_mm",
]
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: The number of leading arguments that are 16-bit operands; others (masks, log-sum-exp of each row) may be FP32.
_OPERANDS = {_FLASH: 3, _FLASH_BACKWARD: 5}

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of FP16 or BF16 tensors on the CPU in FP32 and rounds their results.

    torch disables the mode while it handles an operation, so it is enabled again for operations that call others.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        way = _WAYS.get(func)
        if types and way is not None:
            # A subclass (FP8 values with their scales, a DTensor) computes its product of plain tensors, which the mode sees.
            return NotImplemented
        if way is not None and (dtype := _half_dtype(func, args, kwargs)) is not None:
            return way(func, args, kwargs, dtype)
        if func in _OPENED and _half_dtype(func, args, kwargs) is not None:
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


# -- the ways to compute --------------------------------------------------------------------------------------------------


def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    a, b = args
    if a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]:
        return blocks.product(a, b)
    return func(*args)  # let torch raise its own error about the shapes


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    bias, a, b = args
    if not kwargs and a.dim() == b.dim() == 2 and bias.shape == b.shape[1:] and a.shape[1] == b.shape[0]:
        return blocks.product(a, b, bias)
    return _in_float32(func, args, kwargs, dtype)


def _in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    made = func(*map(_to_float32, args), **{name: _to_float32(value) for name, value in kwargs.items()})
    if isinstance(made, torch.Tensor):
        return made.to(dtype)
    return tuple(value.to(dtype) if isinstance(value, torch.Tensor) else value for value in made)


def _flash(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Compute attention; return each row's log-sum-exp in FP32, which the 16-bit kernels too save for their backward."""
    out, log_sum = func(*map(_to_float32, args), **{name: _to_float32(value) for name, value in kwargs.items()})
    return out.to(dtype), log_sum


def _out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Compute in FP32 and round into the ``out=`` tensor; torch raises its own error if the shapes are wrong."""
    out = kwargs["out"]
    made = torch.empty_like(out, dtype=torch.float32)
    func(*map(_to_float32, args), **{**kwargs, "out": made})
    return out.resize_(made.shape).copy_(made)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    total = args[0].float()
    func(total, *map(_to_float32, args[1:]), **kwargs)
    return args[0].copy_(total)


# -- the way for each operation -------------------------------------------------------------------------------------------


def _overloads(names: Iterable[str], *variants: str) -> Iterator[Any]:
    """Yield the overloads of these operations that this version of torch has."""
    packets = (getattr(_aten, name, None) for name in names)
    return (getattr(packet, variant) for packet in packets for variant in variants if hasattr(packet, variant))


_WAYS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_overloads(_PRODUCTS, "default"), _in_float32),
    **dict.fromkeys(_overloads(_PRODUCTS, "out"), _out),
    **dict.fromkeys(_overloads([f"{name}_" for name in _PRODUCTS], "default"), _in_place),
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _FLASH: _flash,
    _FLASH_BACKWARD: _in_float32,
}
_OPENED = frozenset(_overloads(_COMPOSED, "default"))


@cache
def is_composite(func: Any) -> bool:
    """Return whether torch only composes the operation of others; a mode sees such operations in inference mode alone.

    A few operations (the backwards of SiLU and Mish) have a kernel too, whose last bits differ from the composition's.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd")) and not has(func.name(), "CPU")


def _half_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the operands' dtype if all are strided CPU tensors of the same 16-bit dtype, else None."""
    found: torch.dtype | None = None
    operands = (*args, *kwargs.values())
    for value in operands[: _OPERANDS.get(func, len(operands))]:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if value.dtype not in _HALVES or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        if found is not None and value.dtype != found:
            return None
        found = value.dtype
    return found


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value
