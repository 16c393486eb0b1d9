"""From an operator as a trace has it to the matrix products it computes."""

from __future__ import annotations

import re

from mpinspect.kernels.records import TraceOp
from mpinspect.shapes.operators import matmuls_of
from mpinspect.shapes.records import ITEM_SIZES, Matmul, Operand

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
