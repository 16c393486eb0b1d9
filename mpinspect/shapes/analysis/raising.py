"""Products that torch refuses to compute for their sizes, layouts or dtypes.

Sources: torch's aten/src/ATen/native/cuda/Blas.cpp, ScaledBlas.cpp and GroupedBlas.cpp, and their checks in
torch/_meta_registrations.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, contiguous_strides, layouts
from mpinspect.shapes.analysis.verdict import Reading
from mpinspect.shapes.records import Matmul, Operand


def raising_reading(matmul: Matmul, gpu: Gpu) -> Reading | None:
    """The verdict on a product that raises on a GPU: "off"; None where it does not."""
    faults = list(_faults(matmul, gpu))
    if faults:
        return Reading("off", f"torch raises: {matmul.op.removeprefix('aten::')} needs {'; '.join(faults)}", "raises")
    return Reading("off", f"torch raises: {matmul.raises}", "raises") if matmul.raises else None


def _faults(matmul: Matmul, gpu: Gpu) -> Iterator[str]:
    name = matmul.op.removeprefix("aten::").split(".")[0]
    if name == "_int_mm":
        yield from _int_mm(matmul)
    elif name in ("_scaled_mm", "_scaled_mm_v2"):
        yield from _scaled_mm(matmul, gpu)
    elif "grouped_mm" in name:
        yield from _grouped_mm(matmul)


def _int_mm(matmul: Matmul) -> Iterator[str]:
    if matmul.m <= 16:
        yield f"more than 16 rows ({matmul.m})"
    for letter, size in (("K", matmul.k), ("N", matmul.n)):
        if size % 8:
            yield f"{letter} a multiple of 8 ({size:,} -> {up_to(size, 8):,})"


def _scaled_mm(matmul: Matmul, gpu: Gpu) -> Iterator[str]:
    for letter, size in (("K", matmul.k), ("N", matmul.n)):
        if size % 16:
            yield f"{letter} a multiple of 16 ({size:,} -> {up_to(size, 16):,})"
    if matmul.a is not None and not _has_unit_stride(matmul.a, -1):
        yield "A row-major"
    if matmul.b is not None and not _has_unit_stride(matmul.b, -2):
        yield "B column-major (pass weight.t() of a contiguous weight)"
    if gpu.multiplies(matmul.dtype) is False:
        yield f"a GPU that multiplies {matmul.dtype}, which {gpu.name} does not"


def _grouped_mm(matmul: Matmul) -> Iterator[str]:
    for layout in layouts(matmul):
        if layout.name != "output" and layout.stride_bytes is not None and layout.stride_bytes % FULL_ALIGNMENT:
            yield f"{layout.name}'s row stride a multiple of 16 bytes ({layout.stride_bytes:,})"


def _has_unit_stride(operand: Operand, dimension: int) -> bool:
    if len(operand.shape) < 2:
        return True
    strides = operand.strides or contiguous_strides(operand.shape)
    return strides[dimension] == 1 or operand.shape[dimension] == 1


def up_to(size: int, multiple: int) -> int:
    """The least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple
