"""Find the matrix products of operators in traces, and match each kernel with its product and FLOPs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.records import TraceOp
from mpinspect.shapes.analysis import ShapeVerdict, judge
from mpinspect.shapes.operators import matmuls_of
from mpinspect.shapes.records import ITEM_SIZES, Matmul, Operand

#: torch's names of dtypes by the C++ names that the profiler writes (torch/csrc/profiler: ``scalarTypeToTypeMeta(...).name()``).
_DTYPES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "char": "int8",
    "bool": "bool",
}
#: torch counts elements in 64 bits, and no machine computes a product with more operations than this (30,000 years at an
#: exaflop/s). Larger numbers indicate damaged traces, so results derived from them count as unknown.
_LONGEST, _MOST_OPERATIONS = 2**63 - 1, 10**30
_COMPLEX = {"double": "complex128", "float": "complex64"}


def dtype_name(written: str) -> str:
    """Return torch's name of a dtype written as in a trace ("bfloat16" for "c10::BFloat16"); "" for "Scalar" and the like."""
    name = written.strip().removeprefix("c10::").removeprefix("at::")
    complex_ = re.fullmatch(r"complex<(\w+)>", name)
    if complex_:
        return _COMPLEX.get(complex_[1], "")
    lowered = name.lower()
    found = _DTYPES.get(lowered, lowered)
    return found if found in ITEM_SIZES else ""


def operands_of(op: TraceOp) -> tuple[Operand | None, ...]:
    """Return an operator's arguments, with None for arguments that are not tensors; () if the trace has no shapes."""
    if op.shapes is None or op.dtypes is None:
        return ()
    strides = op.strides if op.strides is not None else (None,) * len(op.shapes)
    found: list[Operand | None] = []
    # In a damaged event the lists differ in length; their common part is still usable.
    for shape, stride, written in zip(op.shapes, strides, op.dtypes, strict=False):
        dtype = dtype_name(written)
        if stride is not None and len(stride) != len(shape):
            stride = None
        # Traces have no offsets: None means unknown, whereas 0 would mean aligned.
        found.append(Operand(tuple(shape), stride, dtype, offset=None) if dtype else None)
    return tuple(found)


def products_of(op: TraceOp) -> tuple[Matmul, ...]:
    """Return the matrix products that an operator computes; () without products, or if the trace lacks its shapes."""
    operands = operands_of(op)
    if not operands:
        return ()
    if any(size > _LONGEST for operand in operands if operand is not None for size in operand.shape):
        return ()
    try:
        found = matmuls_of(op.name, operands, scalars=op.scalars or ())
    except (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError):
        # Traces may be old, new or edited: an unreadable operator loses its FLOPs, but the report continues.
        return ()
    if any(max(product.flops, product.bytes) > _MOST_OPERATIONS for product in found):
        return ()
    return found


class Products:
    """Find the products of operators, once per operator: looked up by identity first, because hashing shapes is slow."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Matmul, ...]] = {}
        self._by_value: dict[TraceOp, tuple[Matmul, ...]] = {}

    def of(self, op: TraceOp | None) -> tuple[Matmul, ...]:
        """Return ``products_of(op)``, cached. The operators must stay alive as long as this object."""
        if op is None:
            return ()
        if id(op) not in self._by_identity:
            if op not in self._by_value:
                self._by_value[op] = products_of(op)
            self._by_identity[id(op)] = self._by_value[op]
        return self._by_identity[id(op)]


def dtypes_of(op: TraceOp | None) -> list[str]:
    """Return the dtypes of an operator's tensors in order, by torch's names; [] if unknown."""
    if op is None or op.dtypes is None:
        return []
    return list(filter(None, map(dtype_name, op.dtypes)))


#: The shape rule's verdicts by the ids of product and GPU; ``Products`` and the rows hold references to both.
_ShapeVerdicts = dict[tuple[int, int], ShapeVerdict]

#: Patterns of kernel names that distinguish the gradients of a convolution (cuDNN, CUTLASS; also mangled: Conv2dDgrad).
_GRADIENTS = (("dgrad", re.compile(r"dgrad", re.IGNORECASE)), ("wgrad", re.compile(r"wgrad", re.IGNORECASE)))


def with_products(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """Return the rows in the same order, with their product, its FLOPs and the shape rule's verdict if these are known.

    Among the kernels of one call, only those that compute products get FLOPs; helper kernels (split-K reductions, layout
    conversions) have no FLOPs. If calls are not numbered, several kernels of one operator have no FLOPs: it is unknown whether
    they belong to one call or to many.
    """
    calls: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        op = row.kernel.matmul_op
        if op is not None and row.is_product:
            calls[call_key(row, op)].append(index)
    products, found = Products(), list(rows)
    judged: _ShapeVerdicts = {}
    for indices in calls.values():
        of_call = products.of(rows[indices[0]].kernel.matmul_op)
        if of_call:
            for index, row in zip(indices, _assigned([rows[i] for i in indices], of_call, judged), strict=True):
                found[index] = row
    return found


def call_key(row: KernelRow, op: TraceOp) -> tuple[int, bool, int]:
    """Return a key shared by the kernels of one call, or of all calls of ``op`` if the trace does not number calls."""
    number = row.kernel.call
    return row.trace, number is None, id(op) if number is None else number


def _assigned(rows: list[KernelRow], products: tuple[Matmul, ...], judged: _ShapeVerdicts) -> list[KernelRow]:
    """Return the rows of one call, each with its product."""
    if len(rows) == len(products) == 1:
        return [_with(rows[0], products[0], rows, judged)]
    by_product: dict[int, list[KernelRow]] = defaultdict(list)
    chosen = [_product_of(row.name, products) for row in rows]
    for row, product in zip(rows, chosen, strict=True):
        if product is not None:
            by_product[id(product)].append(row)
    return [
        row if product is None else _with(row, product, by_product[id(product)], judged)
        for row, product in zip(rows, chosen, strict=True)
    ]


def _with(row: KernelRow, product: Matmul, together: list[KernelRow], judged: _ShapeVerdicts) -> KernelRow:
    key = id(product), id(row.gpu)
    if key not in judged:
        # A FP32 product on Tensor Cores was allowed TF32; for one on CUDA cores, the verdict shows what TF32 would need.
        judged[key] = judge(product, row.gpu, tf32=True)
    # dataclasses.replace takes twice as long, and a trace has hundreds of thousands of rows.
    return KernelRow(
        row.kernel,
        row.named,
        row.gpu,
        row.trace,
        row.verdict,
        row.reason,
        row.basis,
        product.dtype or row.dtype,
        product,
        _flops(row, together, product),
        judged[key],
    )


def _product_of(name: str, products: tuple[Matmul, ...]) -> Matmul | None:
    """Return the product that a kernel computes: the only one, or the one whose role is in the kernel's name."""
    if len(products) == 1:
        return products[0]
    for role, pattern in _GRADIENTS:
        if pattern.search(name):
            of_role = [product for product in products if product.role == role]
            if len(of_role) == 1:
                return of_role[0]
            break
    return None


def _flops(row: KernelRow, together: list[KernelRow], product: Matmul) -> float | None:
    """Return the kernel's part of the FLOPs, shared by time among kernels of one name; None if names differ (Winograd)."""
    if len(together) == 1:
        return float(product.flops)
    if len({other.name for other in together}) > 1 or row.kernel.call is None:
        return None
    total = sum(other.time_us for other in together)
    if total <= 0:
        return None
    return product.flops * row.time_us / total
