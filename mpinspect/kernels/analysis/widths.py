"""How wide the numbers are that a kernel which is no product reads and writes: what a 16-bit dtype could halve at best."""

from __future__ import annotations

import re
from functools import lru_cache

from mpinspect.kernels.analysis.operands import dtype_name
from mpinspect.kernels.analysis.rows import KernelRow

_NARROW = re.compile(r"bfloat16|half|__nv_bf|fp16|bf16|float8|fp8|e4m3|e5m2", re.IGNORECASE)
_WIDE = re.compile(r"(?<![a-z0-9_])(?:float|double)(?![a-z0-9_])|fp32|_f32|f32_", re.IGNORECASE)
#: What torch's functors compute in, where it is no floating number. Elsewhere in a name int, long and bool are indices and flags.
_WHOLE = re.compile(
    r"(?:Functor\w*|ReduceOp|func_wrapper_t)<(?:bool|(?:(?:un)?signed )?(?:char|short|int|long(?: long)?))[,> ]"
)
_LAYOUT = re.compile(r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)


#: A trace has many kernels of few names: each is looked at once.
_remembered = lru_cache(maxsize=1 << 14)


@_remembered
def is_layout_conversion(name: str) -> bool:
    """A copy between NCHW and NHWC beside a convolution (cuDNN's names)."""
    return _LAYOUT.search(name) is not None


def is_wide(row: KernelRow) -> bool | None:
    """Whether a kernel works on FP32 or wider: by its name, else by its operator's dtypes; None where neither tells."""
    by_name = _wide_by_name(row.name)
    if by_name is not None:
        return by_name
    op = row.kernel.op
    dtypes = {dtype_name(written) for written in op.dtypes or ()} - {""} if op is not None else set()
    return bool(dtypes & {"float32", "float64", "complex64", "complex128"}) if dtypes else None


@_remembered
def _wide_by_name(name: str) -> bool | None:
    # A 16-bit kernel often names float too, for what it accumulates in: the narrow one decides.
    if _NARROW.search(name):
        return False
    if _WIDE.search(name):
        return True
    return False if _WHOLE.search(name) else None
