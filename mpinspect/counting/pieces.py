"""Converts tensors of any layout to plain strided integer tensors of their values' bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_FLOATS_BY_NAME = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
#: The real dtypes that can be counted and that this torch version has.
COUNTABLE = frozenset(getattr(torch, name) for name in _FLOATS_BY_NAME.split() if hasattr(torch, name))
_COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def plain_values(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the stored values as a strided tensor of a real dtype, and the number of implicit zeros.

    Complex numbers become their real and imaginary parts; a sparse tensor that is not coalesced is coalesced first.

    Raises:
        TypeError: not a tensor, or a dtype or kind of tensor that has no exponents to count.
        ValueError: a tensor on the meta device.
    """
    check(tensor)
    values = detached_values(tensor)
    implicit_zeros = 0
    if values.layout is not torch.strided:
        values, implicit_zeros = _stored(values)
    if values.dtype in _COMPLEX:
        # Conjugation changes no magnitudes; a lazily conjugated tensor has no real view, but its conjugate has one.
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
        implicit_zeros *= 2
    return values.resolve_neg(), implicit_zeros


def detached_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain torch.Tensor that shares memory, or the dequantized values of a quantized subclass.

    Raises:
        TypeError: a wrapper subclass (``torch.Tensor._make_wrapper_subclass``) whose values can't be accessed.
    """
    values = tensor.detach()
    if type(values) is torch.Tensor:
        return values
    if type(values).dequantize is not torch.Tensor.dequantize:
        values = values.dequantize()
    with torch._C.DisableTorchFunctionSubclass():
        values = values.as_subclass(torch.Tensor)
    if type(values) is not torch.Tensor:
        raise TypeError(
            f"{_kind(tensor)} is a subclass of torch.Tensor that has no memory of its own and no dequantize(): its values lie in "
            "other tensors"
        )
    return values


def check(tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError, with a clear message, if ``tensor`` cannot be counted."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor or a NumPy array of floating-point numbers, not {_kind(tensor)}")
    if tensor.is_nested:
        raise TypeError("a nested tensor cannot be counted as a whole: count tensor.values() or each of unbind()")
    if tensor.dtype not in COUNTABLE and tensor.dtype not in _COMPLEX:
        raise TypeError(
            f"a tensor of {tensor.dtype} has no floating-point exponents to count; floating-point and complex dtypes "
            "have (convert it, or leave this tensor out)"
        )
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device has a shape but no values to count: materialise the model first")


def flat_bits(values: torch.Tensor, size: int) -> tuple[Iterator[torch.Tensor], int]:
    """Return a strided tensor's bits as one-dimensional pieces of at most ``size`` elements, and how often each piece occurs.

    Non-dense memory is copied piece by piece. An expanded dimension occurs once in the pieces, and multiplies the number.
    """
    bits = values.view(_BITS[values.dtype.itemsize])
    times = 1
    if not bits.is_contiguous() and bits.numel():
        repeated = [d for d in range(bits.dim()) if bits.stride(d) == 0]
        times = math.prod(bits.shape[d] for d in repeated)
        for dimension in reversed(repeated):
            bits = bits.select(dimension, 0)
        order = sorted(range(bits.dim()), key=bits.stride, reverse=True)
        bits = bits.permute(order)
    return _pieces(bits, size), times


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor is dense, without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _pieces(bits: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    if bits.numel() <= size:
        yield bits.reshape(-1)
    elif bits.is_contiguous():
        yield from torch.split(bits.view(-1), size)
    else:
        # Halve the longest dimension until the parts are small enough; the halves may be dense.
        longest = max(range(bits.dim()), key=lambda d: bits.shape[d])
        for half in bits.tensor_split(2, dim=longest):
            yield from _pieces(half, size)


def _stored(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in _COMPRESSED:
        values = tensor.values()
    else:
        values = tensor.to_dense()
    # Detach, because complex values that are a view of a sparse tensor have no real view.
    return values.detach(), tensor.numel() - values.numel()


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
