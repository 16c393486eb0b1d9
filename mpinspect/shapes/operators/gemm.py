"""Describe general matrix products: mm and its variants, batched, with a vector, quantised, grouped and sparse."""

from __future__ import annotations

import math
from dataclasses import replace

from mpinspect.shapes.operators.call import (
    Call,
    UnknownSizesError,
    column,
    expanded,
    folded,
    fresh,
    leading,
    traffic,
    transposed,
)
from mpinspect.shapes.records import Matmul, Operand

#: Two of these values share one byte, along the summed dimension (torch/_meta_registrations.py, meta_scaled_mm).
_PACKED = "float4_e2m1fn_x2"


def gemm(
    call: Call,
    a: Operand,
    b: Operand,
    out: Operand | None = None,
    *,
    addend: Operand | None = None,
    dtype: str = "",
    sizes: tuple[int, int, int, int] | None = None,
) -> tuple[Matmul, ...]:
    """Return the record of a @ b, both of 2 or both of 3 dimensions.

    Args:
        call: the operator's call.
        a, b: the operands as the product reads them.
        out: the result; None assumes the result that torch would allocate.
        addend: the tensor that is added to the product.
        dtype: the result's dtype, if it differs from a's.
        sizes: m, n, k and batch, if they do not follow from the operands' shapes.
    """
    if sizes is None:
        if len(a.shape) != len(b.shape) or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
            raise UnknownSizesError
        sizes = (a.shape[-2], b.shape[-1], a.shape[-1], math.prod(a.shape[:-2]))
    m, n, k, batch = sizes
    if out is None:
        out = fresh((*a.shape[:-2], m, n), dtype or a.dtype)
    record = Matmul(
        op=call.op,
        kind="gemm",
        role="forward",
        m=m,
        n=n,
        k=k,
        batch=batch,
        dtype=a.dtype,
        flops=2 * m * n * k * batch,
        bytes=traffic(a, b, addend, out),
        a=a,
        b=b,
        out=out,
    )
    return (record,)


def plain(call: Call, dims: int, first: int = 0) -> tuple[Matmul, ...]:
    """Return the record of mm(self, mat2) and its like, or with ``first`` 1 of addmm(self, mat1, mat2) and its like.

    Args:
        dims: the number of dimensions of the matrices.
        first: the place of the first one.
    """
    a, b = call.tensor(first, dims), call.tensor(first + 1, dims)
    return gemm(call, a, b, call.result(first + 2), addend=_addend(call, first))


def addbmm(call: Call) -> tuple[Matmul, ...]:
    """Return the record of addbmm(self, batch1, batch2), which sums the batch's products, so that ``out`` is one matrix."""
    a, b = call.tensor(1, 3), call.tensor(2, 3)
    out = call.result(3) or fresh((a.shape[1], b.shape[2]), a.dtype)
    return gemm(call, a, b, out, addend=call.optional(0))


def mv(call: Call, first: int = 0) -> tuple[Matmul, ...]:
    """Return the record of mv(self, vec), or with ``first`` 1 of addmv(self, mat, vec), with n = 1."""
    matrix, vector = call.tensor(first, 2), call.tensor(first + 1, 1)
    return _matrix_vector(call, matrix, vector, call.result(first + 2), _addend(call, first))


def dot(call: Call) -> tuple[Matmul, ...]:
    """Return the record of dot(self, tensor) or vdot, with m = n = 1."""
    return gemm(call, leading(call.tensor(0, 1)), column(call.tensor(1, 1)))


def linear(call: Call, weight_at: int = 1) -> tuple[Matmul, ...]:
    """Return the record of linear(input, weight, bias), mkldnn_linear or, with ``weight_at`` 2, mkl::_mkl_linear.

    m is the product of the input's leading dimensions.
    """
    x, weight, bias = call.tensor(0), call.tensor(weight_at), call.optional(weight_at + 1)
    if not x.shape:
        raise UnknownSizesError
    if len(weight.shape) == 1:
        return _matrix_vector(call, folded(x), weight, None, bias)
    if len(weight.shape) != 2:
        raise UnknownSizesError
    a = leading(x) if len(x.shape) == 1 else folded(x)
    return gemm(call, a, transposed(weight), addend=bias)


def matmul(call: Call) -> tuple[Matmul, ...]:
    """Return the record of matmul(self, other), by the numbers of dimensions, as torch.matmul documents."""
    a, b = call.tensor(0), call.tensor(1)
    if not a.shape or not b.shape:
        raise UnknownSizesError
    if len(a.shape) == len(b.shape) == 1:
        return dot(call)
    if len(b.shape) == 1:
        return _matrix_vector(call, folded(a), b, None, None)
    if len(a.shape) == 1:
        a = leading(a)
    if len(b.shape) == 2:
        return gemm(call, folded(a), b)
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    return gemm(call, folded(expanded(a, batch), 2), folded(expanded(b, batch), 2))


def scaled_mm(call: Call) -> tuple[Matmul, ...]:
    """Return the record of _scaled_mm(self, mat2, scale_a, scale_b, ...): FP8 and FP4."""
    a, b = call.tensor(0, 2), call.tensor(1, 2)
    dtype = dtype_name(call.value(9 if call.op.endswith("_v2") else 6))
    k = a.shape[1] * _values_a_byte(a)
    if a.shape[1] != b.shape[0]:
        raise UnknownSizesError
    found = gemm(call, a, b, call.output, dtype=dtype, sizes=(a.shape[0], b.shape[1], k, 1))
    return tuple(replace(record, block=_block(call, a, k)) for record in found)


def _values_a_byte(operand: Operand) -> int:
    return 2 if operand.dtype == _PACKED else 1


def _block(call: Call, a: Operand, k: int) -> int:
    """Return how many values along K share a scale, from the scales' dtype or number; 0 for one scale a tensor or row."""
    scale = call.optional(2) or next(iter(call.tensors(2)), None)
    if scale is None:
        return 0
    if a.dtype == _PACKED and scale.dtype.startswith("float8_e4m3"):
        return 16
    if a.dtype == _PACKED or scale.dtype == "float8_e8m0fnu":
        return 32
    by_128 = len(scale.shape) == 2 and k > 128 and -(-k // 128) in scale.shape and 1 not in scale.shape
    if scale.dtype == "float32" and by_128:
        return 128
    return 0


def grouped_mm(call: Call) -> tuple[Matmul, ...]:
    """Return the record of _grouped_mm(self, mat2, offs) or _scaled_grouped_mm: experts' products with sizes on the device.

    The groups divide the rows (or the summed dimension) of two-dimensional operands among them: one record covers all groups,
    with the total number of rows (or the total summed dimension) and ``batch`` 1.
    """
    a, b = call.tensor(0), call.tensor(1)
    packed = _values_a_byte(a)
    dims = (len(a.shape), len(b.shape))
    if dims == (3, 3):
        return gemm(call, a, b, call.output)
    if dims == (2, 3):
        sizes = (a.shape[0], b.shape[2], a.shape[1] * packed, 1)
    elif dims == (3, 2):
        sizes = (a.shape[1], b.shape[1], a.shape[2] * packed, 1)
    elif dims == (2, 2):
        sizes = (a.shape[0], b.shape[1], a.shape[1] * packed, 1)
    else:
        raise UnknownSizesError
    return gemm(call, a, b, call.output, sizes=sizes)


def sparse_linear(call: Call) -> tuple[Matmul, ...]:
    """Return the record of _sparse_semi_structured_linear(input, weight, meta), with dense FLOPs; weight at half its width."""
    x, weight = folded(call.tensor(0)), call.tensor(1, 2)
    return gemm(call, x, transposed(weight), None, sizes=(x.shape[0], weight.shape[0], x.shape[1], 1))


def sparse_mm(call: Call, first: int = 0) -> tuple[Matmul, ...]:
    """Return the record of _sparse_semi_structured_mm(mat1, meta, mat2), or with ``first`` 1 of its addmm, with dense FLOPs.

    mat1 is stored at half its width.
    """
    a, b = call.tensor(first, 2), call.tensor(first + 2, 2)
    sizes = (a.shape[0], b.shape[1], b.shape[0], 1)
    return gemm(call, a, b, call.output, addend=_addend(call, first), sizes=sizes)


def packed_weight(call: Call) -> tuple[Matmul, ...]:
    """Return the record of _weight_int8pack_mm(self, mat2), weight (n, k), or _weight_int4pack_mm, weight (n / 8, ...)."""
    a, weight = call.tensor(0, 2), call.tensor(1)
    if not weight.shape:
        raise UnknownSizesError
    n = weight.shape[0]
    if "int4" in call.op and len(weight.shape) == 4:
        n *= 8
    return gemm(call, a, weight, call.output, sizes=(a.shape[0], n, a.shape[1], 1))


def mixed_linear(call: Call) -> tuple[Matmul, ...]:
    """Return the record of _mixed_dtypes_linear(input, weight, scale), with an INT8 or packed INT4 weight (k, n or n / 2)."""
    x, weight = folded(call.tensor(0)), call.tensor(1, 2)
    n = weight.shape[1]
    if call.output and call.output.shape:
        n = call.output.shape[-1]
    return gemm(call, x, weight, None, sizes=(x.shape[0], n, x.shape[1], 1))


def _addend(call: Call, first: int) -> Operand | None:
    """Return the tensor that is added, which is the argument before the matrices."""
    return call.optional(0) if first else None


def _matrix_vector(
    call: Call, matrix: Operand, vector: Operand, out: Operand | None, addend: Operand | None
) -> tuple[Matmul, ...]:
    if out is not None:
        out = column(out) if len(out.shape) == 1 else None
    return gemm(call, matrix, column(vector), out, addend=addend)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(first), len(second))
    pairs = zip((1,) * (length - len(first)) + first, (1,) * (length - len(second)) + second, strict=True)
    sizes = []
    for one, other in pairs:
        if one != other and 1 not in (one, other):
            raise UnknownSizesError
        sizes.append(other if one == 1 else one)
    return tuple(sizes)


def dtype_name(value: object) -> str:
    """Return the name of a torch dtype; "" for the numbers that the profiler writes, which differ between versions."""
    name = str(value).removeprefix("torch.")
    if name[:1].isalpha() and any(char.isdigit() for char in name):
        return name
    return ""
