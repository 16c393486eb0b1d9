"""Describe what stopped a recording, and provide a result for products that torch refuses, so that the run can continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpinspect.reporting.words import filled
from mpinspect.shapes.record.values import Lack
from mpinspect.shapes.records import Matmul

_NO_KERNEL = "the operator has no meta kernel, as custom C++ and CUDA operators often do not"
#: Parts of torch's messages, in lower case, and their causes on meta tensors.
_CAUSES = (
    (
        (
            "item()",
            "_local_scalar_dense",
            "no data!",
            "cannot copy out of meta",
            "data-dependent",
            "data dependent",
            "boolean value of tensor",
        ),
        "it reads a value of a tensor on the host (.item(), an if on a tensor)",
    ),
    (
        ("nonzero", "masked_select", "unique", "repeat_interleave", "bincount", "multinomial"),
        "the shape of its result depends on values",
    ),
    (("meta kernel", "'meta' backend", "meta backend", "fake impl", "register_fake"), _NO_KERNEL),
    (("numpy", " meta ", "=meta", "meta device", "meta tensor", "device meta"), "it needs the values of a tensor"),
)


class RecordingError(ValueError):
    """Raised if the recording is empty, usually because of wrong arguments, and never because of missing values."""


def meta_cause(error: BaseException, operator: str = "") -> str:
    """Return why meta tensors caused an exception; "" if they did not cause it.

    Args:
        error: the exception.
        operator: the operator that raised the exception; "" if no operator did.
    """
    text = f"{type(error).__name__} {error} {operator}".lower()
    return next((cause for parts, cause in _CAUSES if any(part in text for part in parts)), "")


def reason(
    error: BaseException, phase: str, where: str | None, operator: str, device: str, lack: Lack | None = None
) -> str:
    """Return where a run stopped and why, without a full stop.

    Args:
        lack: why the tensor lacks the values that the operator needs; None if not known.
    """
    why = first_line(error)
    if device == "meta" and (cause := meta_cause(error, operator)):
        if lack and cause is not _NO_KERNEL:
            cause += f", and that tensor {lack.why}; {lack.give}"
        elif cause is not _NO_KERNEL:
            cause += ", and meta tensors have none"
        why = f"{cause} ({why})"
    place = "" if where is None else f" in {where or 'the model itself'}"
    return f"the {phase} stopped{place}{filled(' at {}', operator)}: {why}"


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, at most 200 characters, without a full stop."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    text = f"{type(error).__name__}: {first}".rstrip(". :")
    if len(text) <= 200:
        return text
    return text[:197].rstrip(". ") + " [...]"


#: Operators that, with matching sizes, fail only because of a rule of their own; by name without the namespace. Operators with
#: an addend are excluded: they can also fail because of the addend, which is a mistake on any device.
_OWN_RULES = ("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2")
#: Operators whose operands must share one dtype: TORCH_CHECKs of ATen/native/cuda/Blas.cpp that meta kernels lack.
_ONE_DTYPE = ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")


def mixed_dtypes(record: Matmul) -> str:
    """Return torch's message for two operands of different dtypes; "" if the operator accepts them."""
    a, b = record.a, record.b
    if a is None or b is None or a.dtype == b.dtype:
        return ""
    if record.op.partition("::")[2] in _ONE_DTYPE:
        return f"mat1 and mat2 must have the same dtype, but got {a.dtype} and {b.dtype}"
    if record.convolution is not None and record.role == "forward":
        return f"Input type ({a.dtype}) and weight type ({b.dtype}) should be the same"
    return ""


def result_of_refused(func: Any, records: Sequence[Matmul], error: Exception) -> torch.Tensor | None:
    """Return the result, on the meta device, of a product that torch refused because of its operands.

    Returns:
        The empty result tensor; None if its form is not known, or if missing values were the cause.
    """
    name = func._schema.name
    if len(records) != 1 or func._overloadname != "default":
        return None
    if name.partition("::")[2] not in _OWN_RULES and not (records[0].convolution and mixed_dtypes(records[0])):
        return None
    out = records[0].out
    if out is None or meta_cause(error, str(func)):
        return None
    dtype = getattr(torch, out.dtype, None)
    if name == "aten::_int_mm":
        dtype = torch.int32
    if dtype is None:
        return None
    return torch.empty(out.shape, dtype=dtype, device="meta")
