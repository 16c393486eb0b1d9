"""How wide the numbers are that a kernel which is no product reads and writes: what a 16-bit dtype could halve at best."""

from __future__ import annotations

import re
from functools import lru_cache

from mpinspect.analysis.tensor_cores.operands import dtype_name
from mpinspect.analysis.tensor_cores.rows import KernelRow

_NARROW = re.compile(r"bfloat16|half|__nv_bf|fp16|bf16|float8|fp8|e4m3|e5m2", re.IGNORECASE)
_WIDE = re.compile(r"(?<![a-z0-9_])(?:float|double)(?![a-z0-9_])|fp32|_f32|f32_", re.IGNORECASE)
_LAYOUT = re.compile(r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)


#: A trace has many kernels of few names: each is looked at once.
_remembered = lru_cache(maxsize=1 << 14)


@_remembered
def is_layout_conversion(name: str) -> bool:
    """A copy between NCHW and NHWC beside a convolution (cuDNN's names)."""
    return _LAYOUT.search(name) is not None


def may_be_wide(row: KernelRow) -> bool:
    """Whether a kernel may work on FP32 or wider: by its name, else by its operator's dtypes; True where neither tells."""
    by_name = _wide_by_name(row.name)
    if by_name is not None:
        return by_name
    op = row.kernel.op
    dtypes = {dtype_name(written) for written in op.dtypes or ()} - {""} if op is not None else set()
    return not dtypes or bool(dtypes & {"float32", "float64", "complex64", "complex128"})


@_remembered
def _wide_by_name(name: str) -> bool | None:
    # A 16-bit kernel often names float too, for what it accumulates in: the narrow one decides.
    if _NARROW.search(name):
        return False
    return True if _WIDE.search(name) else None
