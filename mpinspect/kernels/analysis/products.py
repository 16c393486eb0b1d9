"""From operators, as traces describe them, to matrix products: which kernel computed which product, and its FLOPs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.records import TraceOp
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis import ShapeVerdict, judge
from mpinspect.shapes.operators import matmuls_of
from mpinspect.shapes.records import ITEM_SIZES, Matmul, Operand

if TYPE_CHECKING:
    pass

#: What the profiler calls a dtype (C++ names; torch/csrc/profiler writes ``scalarTypeToTypeMeta(...).name()``), as torch does.
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
#: torch counts elements in 64 bits, and no machine computes a product of more operations than this (an exaflop/s needs 30,000
#: years): larger numbers are damage, and what follows from them is unknown.
_LONGEST, _MOST_OPERATIONS = 2**63 - 1, 10**30
_COMPLEX = {"double": "complex128", "float": "complex64"}


def dtype_name(written: str) -> str:
    """torch's name for a dtype as a trace writes it: "c10::BFloat16" -> "bfloat16"; "" for what is none ("Scalar", "")."""
    name = written.strip().removeprefix("c10::").removeprefix("at::")
    complex_ = re.fullmatch(r"complex<(\w+)>", name)
    if complex_:
        return _COMPLEX.get(complex_[1], "")
    lowered = name.lower()
    found = _DTYPES.get(lowered, lowered)
    return found if found in ITEM_SIZES else ""


def operands_of(op: TraceOp) -> tuple[Operand | None, ...]:
    """The tensors among an operator's arguments, one entry an argument; () without shapes."""
    if op.shapes is None or op.dtypes is None:
        return ()
    strides = op.strides if op.strides is not None else (None,) * len(op.shapes)
    found: list[Operand | None] = []
    # Lists of unlike lengths are a damaged event: what they share is still good.
    for shape, stride, written in zip(op.shapes, strides, op.dtypes, strict=False):
        dtype = dtype_name(written)
        usable = stride if stride is not None and len(stride) == len(shape) else None
        # A trace does not tell offsets: None, not 0.
        found.append(Operand(tuple(shape), usable, dtype, offset=None) if dtype else None)
    return tuple(found)


def products_of(op: TraceOp) -> tuple[Matmul, ...]:
    """The matrix products that an operator computes; () if it computes none, or the trace lacks its shapes."""
    operands = operands_of(op)
    if not operands:
        return ()
    if any(size > _LONGEST for operand in operands if operand is not None for size in operand.shape):
        return ()
    try:
        found = matmuls_of(op.name, operands, scalars=op.scalars or ())
    except (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError):
        # Traces are written by many versions, and edited: an odd operator costs its FLOPs, not the report.
        return ()
    return () if any(max(product.flops, product.bytes) > _MOST_OPERATIONS for product in found) else found


class Products:
    """The products of operators, each operator looked at once: by identity first, for hashing shapes takes long."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Matmul, ...]] = {}
        self._by_value: dict[TraceOp, tuple[Matmul, ...]] = {}

    def of(self, op: TraceOp | None) -> tuple[Matmul, ...]:
        """As ``products_of``; the operators must stay alive meanwhile."""
        if op is None:
            return ()
        if id(op) not in self._by_identity:
            if op not in self._by_value:
                self._by_value[op] = products_of(op)
            self._by_identity[id(op)] = self._by_value[op]
        return self._by_identity[id(op)]


def dtype_of(op: TraceOp | None) -> str:
    """The dtype of an operator's first tensor; "" where unknown."""
    if op is None or op.dtypes is None:
        return ""
    names = [dtype_name(written) for written in op.dtypes]
    return next((name for name in names if name), "")


class ShapeRule:
    """Today's shape rule, each product and GPU judged once.

    A FP32 product that ran on Tensor Cores was allowed TF32; of one that did not, it is asked what TF32 would need.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], ShapeVerdict] = {}
        # What is known by identity must not be let go: its number could be another's then.
        self._kept: list[tuple[Matmul, Gpu]] = []

    def verdict(self, matmul: Matmul, gpu: Gpu) -> ShapeVerdict:
        key = id(matmul), id(gpu)
        if key not in self._known:
            self._known[key] = judge(matmul, gpu, tf32=True)
            self._kept.append((matmul, gpu))
        return self._known[key]


#: How kernels' names tell the gradients of a convolution apart (cuDNN, CUTLASS; also mangled: Conv2dDgrad).
_GRADIENTS = (("dgrad", re.compile(r"dgrad", re.IGNORECASE)), ("wgrad", re.compile(r"wgrad", re.IGNORECASE)))


def with_products(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """The rows with their product, its FLOPs and the shape rule's verdict where these follow, in the same order.

    Kernels of one call belong together. FLOPs belong to those of them that compute products; helpers beside them (split-K
    reductions, layout conversions) get none. Where the call's number is unknown, so are the FLOPs of kernels that share
    an operator's object: it may stand for one call or for many.
    """
    calls: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        number, op = row.kernel.call, row.kernel.matmul_op
        if op is not None and row.is_product:
            calls[row.trace, number is None, id(op) if number is None else number].append(index)
    found, products, rule = list(rows), Products(), ShapeRule()
    for indices in calls.values():
        of_call = products.of(rows[indices[0]].kernel.matmul_op)
        if of_call:
            for index, row in zip(indices, _assigned([rows[i] for i in indices], of_call, rule), strict=True):
                found[index] = row
    return found


def _assigned(rows: list[KernelRow], products: tuple[Matmul, ...], rule: ShapeRule) -> list[KernelRow]:
    """The rows of one call, each with its product."""
    if len(rows) == len(products) == 1:
        return [_with(rows[0], products[0], rows, rule)]
    by_product: dict[int, list[KernelRow]] = defaultdict(list)
    chosen = [_product_of(row.name, products) for row in rows]
    for row, product in zip(rows, chosen, strict=True):
        if product is not None:
            by_product[id(product)].append(row)
    return [
        row if product is None else _with(row, product, by_product[id(product)], rule)
        for row, product in zip(rows, chosen, strict=True)
    ]


def _with(row: KernelRow, product: Matmul, together: list[KernelRow], rule: ShapeRule) -> KernelRow:
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
        rule.verdict(product, row.gpu),
    )


def _product_of(name: str, products: tuple[Matmul, ...]) -> Matmul | None:
    """The product that a kernel computes: the only one, or the one whose role its name tells."""
    if len(products) == 1:
        return products[0]
    for role, pattern in _GRADIENTS:
        if pattern.search(name):
            of_role = [product for product in products if product.role == role]
            return of_role[0] if len(of_role) == 1 else None
    return None


def _flops(row: KernelRow, together: list[KernelRow], product: Matmul) -> float | None:
    """The product's FLOPs, shared by time among equal kernels; None where unlike kernels compute it (Winograd's parts)."""
    if len(together) == 1:
        return float(product.flops)
    if len({other.name for other in together}) > 1 or row.kernel.call is None:
        return None
    total = sum(other.time_us for other in together)
    return product.flops * row.time_us / total if total > 0 else None
