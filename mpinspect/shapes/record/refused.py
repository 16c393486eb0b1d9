"""Products that torch refuses for their operands: what it says, and a result for the run to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpinspect.shapes.record.failures import meta_cause
from mpinspect.shapes.records import Matmul

#: Operators that fail, their sizes fitting each other, for no other reason than a rule of their own; by their names without the
#: namespace. Those that add something fail for what they add, too, which is a mistake on any device.
_OWN_RULES = ("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2")
#: Those of which both factors must have one dtype: TORCH_CHECKs of ATen/native/cuda/Blas.cpp that meta kernels lack.
_ONE_DTYPE = ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")


def mixed_dtypes(record: Matmul) -> str:
    """What torch says of two factors of different dtypes; "" where they have one, or the operator takes two."""
    a, b = record.a, record.b
    if a is None or b is None or a.dtype == b.dtype:
        return ""
    if record.op.partition("::")[2] in _ONE_DTYPE:
        return f"mat1 and mat2 must have the same dtype, but got {a.dtype} and {b.dtype}"
    if record.convolution is not None and record.role == "forward":
        return f"Input type ({a.dtype}) and weight type ({b.dtype}) should be the same"
    return ""


def result_of_refused(func: Any, records: Sequence[Matmul], error: Exception) -> torch.Tensor | None:
    """A result, on the meta device, of a product that failed for its own rules; None where it is not known or the cause is
    that meta tensors have no values."""
    name = func._schema.name
    if len(records) != 1 or func._overloadname != "default":
        return None
    if name.partition("::")[2] not in _OWN_RULES and not (records[0].convolution and mixed_dtypes(records[0])):
        return None
    out = records[0].out
    if out is None or meta_cause(error, str(func)):
        return None
    dtype = torch.int32 if name == "aten::_int_mm" else getattr(torch, out.dtype, None)
    return None if dtype is None else torch.empty(out.shape, dtype=dtype, device="meta")
