"""Find the matrix products that an operator computes, from the shapes of its arguments alone; without torch.

To add an operator, add a line to a family's table; to add a family, add a file with a function from a ``Call`` to records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mpinspect.shapes.operators import attention, convolution, gemm, recurrent
from mpinspect.shapes.operators.call import Call, Input, UnknownSizesError
from mpinspect.shapes.records import Matmul, Operand

__all__ = ["PRODUCT_OPS", "Input", "matmuls_of", "product_name"]

_Family = Callable[[Call], tuple[Matmul, ...]]

_GEMMS: dict[str, _Family] = {
    "mm": partial(gemm.plain, dims=2),
    "_int_mm": partial(gemm.plain, dims=2),
    "_sparse_mm": partial(gemm.plain, dims=2),
    "addmm": partial(gemm.plain, dims=2, first=1),
    "_addmm_activation": partial(gemm.plain, dims=2, first=1),
    "bmm": partial(gemm.plain, dims=3),
    "baddbmm": partial(gemm.plain, dims=3, first=1),
    "addbmm": gemm.addbmm,
    "mv": gemm.mv,
    "addmv": partial(gemm.mv, first=1),
    "dot": gemm.dot,
    "vdot": gemm.dot,
    "matmul": gemm.matmul,
    "linalg_matmul": gemm.matmul,
    "linear": gemm.linear,
    "mkldnn_linear": gemm.linear,
    "_linear_pointwise": gemm.linear,
    "_mkl_linear": partial(gemm.linear, weight_at=2),
    "_scaled_mm": gemm.scaled_mm,
    "_scaled_mm_v2": gemm.scaled_mm,
    "_grouped_mm": gemm.grouped_mm,
    "_scaled_grouped_mm": gemm.grouped_mm,
    "_scaled_grouped_mm_v2": gemm.grouped_mm,
    "_sparse_semi_structured_linear": gemm.sparse_linear,
    "_sparse_semi_structured_mm": gemm.sparse_mm,
    "_sparse_semi_structured_addmm": partial(gemm.sparse_mm, first=1),
    "_weight_int4pack_mm": gemm.packed_weight,
    "_weight_int8pack_mm": gemm.packed_weight,
    "_mixed_dtypes_linear": gemm.mixed_linear,
}

#: The maximum number of an operator's arguments, ``out`` included. TorchScript's interpreter (torch/csrc/jit) passes its
#: whole stack to the profiler instead, and the operands are not first on that stack.
_MOST_ARGUMENTS = {
    "mm": 3,
    "_int_mm": 3,
    "_sparse_mm": 3,
    "addmm": 6,
    "_addmm_activation": 7,
    "bmm": 3,
    "baddbmm": 6,
    "addbmm": 6,
    "mv": 3,
    "addmv": 6,
    "dot": 3,
    "vdot": 3,
    "matmul": 3,
    "linalg_matmul": 3,
    "linear": 4,
    "mkldnn_linear": 3,
}

#: By name without the namespace.
_FAMILIES: dict[str, _Family] = {
    **_GEMMS,
    **convolution.FAMILY,
    "conv_tbc": convolution.time_convolution,
    **attention.FAMILY,
    **recurrent.FAMILY,
}
_OTHER_NAMESPACES = {"_linear_pointwise": "mkldnn", "_convolution_pointwise": "mkldnn", "_mkl_linear": "mkl"}

#: Operators that are, or contain, a matrix product, as "aten::mm".
PRODUCT_OPS: frozenset[str] = frozenset(f"{_OTHER_NAMESPACES.get(name, 'aten')}::{name}" for name in _FAMILIES)


def matmuls_of(
    op: str, inputs: Sequence[Input], *, scalars: Sequence[object] = (), output: Operand | None = None
) -> tuple[Matmul, ...]:
    """Return the products that one call of an operator computes.

    Args:
        op: the operator's name, "aten::mm"; "aten.mm.default", in-place and ``out=`` forms are accepted too.
        inputs: one entry for each positional argument of the operator's schema: the operand, a sequence of operands for a list
            of tensors, None for an argument that is not a tensor.
        scalars: one entry for each positional argument too: Python values, or the profiler's strings ("[1, 1]", "True", "");
            entries of tensors are ignored.
        output: the first result if known; else the result that torch would allocate is assumed.

    Returns:
        No record if the operator is not a product or its sizes are not known; several records for a convolution's backward and
        for recurrent layers, whose ``parameter`` is the weight's name within its layer ("weight_ih_l0"). Otherwise ``module``
        and ``parameter`` are "", and ``role`` is "forward" unless the operator is a backward.
    """
    name = product_name(op)
    bare = name.partition("::")[2]
    if not name or len(inputs) > _MOST_ARGUMENTS.get(bare, len(inputs)):
        return ()
    try:
        return _FAMILIES[bare](Call(name, inputs, scalars, output))
    except UnknownSizesError:
        return ()


def product_name(op: str) -> str:
    """Return an operator's name in PRODUCT_OPS for any spelling of the name; "" if it is not a product."""
    if op in PRODUCT_OPS:
        return op
    space, _, rest = op.replace("::", ".", 1).partition(".")
    name = rest.partition(".")[0]
    for form in (name, name.removesuffix("_")):
        if f"{space}::{form}" in PRODUCT_OPS:
            return f"{space}::{form}"
    return ""
