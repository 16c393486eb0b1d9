"""Operators of a recording as TraceOp, and which of them are matrix products."""

from __future__ import annotations

import marshal
from typing import Any

from mpinspect.kernels.records import TraceOp
from mpinspect.kernels.trace.recording import Recording
from mpinspect.shapes.operators import PRODUCT_OPS

#: Wrappers that leave the product to another operator stand for it where the trace has no other.
_PRODUCTS = PRODUCT_OPS | {"aten::linear", "aten::matmul", "aten::einsum"}


#: Namespaces whose operators compute no product but for those above. The profiler's and autograd's name no operators.
_NO_PRODUCTS = ("aten::", "autograd::", "prims::", "profiler::", "c10d::")


class Operators:
    """TraceOps of one recording; equal ones are one object."""

    def __init__(self, recording: Recording) -> None:
        self._names = list(recording.names)
        self._described = list(recording.arguments)
        self._name = recording.operators["name"].tolist()
        self._arguments = recording.operators["arguments"].tolist()
        self._made: dict[tuple[int, int], TraceOp] = {}

    def are_products(self) -> list[bool]:
        """Of each name of the recording, by number, whether it is that of a matrix product."""
        return [name in _PRODUCTS for name in self._names]

    def may_be_products(self) -> list[bool]:
        """Of each name, whether it is that of a product or of another library's operator, which may be one."""
        return [name in _PRODUCTS or ("::" in name and not name.startswith(_NO_PRODUCTS)) for name in self._names]

    def record(self, operator: int) -> TraceOp | None:
        """TraceOp of the operator at a position of the recording; None for -1."""
        if operator < 0:
            return None
        key = self._name[operator], self._arguments[operator]
        if key not in self._made:
            described = marshal.loads(self._described[key[1]]) if key[1] >= 0 else [None] * 4
            self._made[key] = _trace_op(self._names[key[0]], *described)
        return self._made[key]


def _trace_op(name: str, dims: Any, strides: Any, dtypes: Any, scalars: Any) -> TraceOp:
    return TraceOp(
        name,
        shapes=tuple(map(_sizes, dims)) if isinstance(dims, list) else None,
        strides=tuple(map(_sizes, strides)) if isinstance(strides, list) else None,
        dtypes=tuple(map(str, dtypes)) if isinstance(dtypes, list) else None,
        scalars=tuple("" if value is None else str(value) for value in scalars) if isinstance(scalars, list) else None,
    )


def _sizes(sizes: object) -> tuple[int, ...]:
    """Of a tensor; () for what is none, lists of tensors among them, whose sizes stand a level deeper."""
    if isinstance(sizes, list) and all(type(size) is int for size in sizes):
        return tuple(sizes)
    return ()
