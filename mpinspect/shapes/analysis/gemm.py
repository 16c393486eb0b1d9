"""Matrix products: the stride rule, and the products that are too thin for any rule."""

from __future__ import annotations

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, Layout, layouts
from mpinspect.shapes.analysis.verdict import Reading
from mpinspect.shapes.records import ITEM_SIZES, Matmul


def nothing_to_multiply(matmul: Matmul) -> Reading | None:
    """Products that no Tensor Core speeds up, whatever their sizes: empty, matrix-vector, depthwise."""
    if 0 in (matmul.m, matmul.n, matmul.k, matmul.batch):
        return Reading("off", "an empty product: nothing is computed", "empty")
    if matmul.convolution is not None:
        if matmul.convolution.is_depthwise:
            return Reading(
                "off",
                "a depthwise convolution has no matrix product in it: memory-bound, no change expected",
                "depthwise",
            )
        return None
    if matmul.attention is None and matmul.k == 1:
        return Reading(
            "off", "an outer product (K 1): bound by writing its result, no change expected", "matrix-vector"
        )
    if matmul.attention is None and 1 in (matmul.m, matmul.n):
        return Reading(
            "off",
            f"matrix-vector (M {matmul.m:,}, N {matmul.n:,}): memory-bound, a gemv or a Tensor Core kernel takes "
            "equally long; no change expected",
            "matrix-vector",
        )
    return None


def gemm_reading(matmul: Matmul, gpu: Gpu) -> Reading:
    """Today's rule: base pointers, row strides and batch strides of A, B and output in multiples of 16 bytes."""
    return stride_reading(matmul, layouts(matmul))


def stride_reading(matmul: Matmul, found: tuple[Layout, ...]) -> Reading:
    """Whether all operands are aligned; the reason names the worst one and what is left."""
    remarks = tuple(
        f"{layout.name} has no dimension of stride 1: torch copies it first" for layout in found if layout.is_copied
    )
    alignment = min((layout.alignment_bytes for layout in found), default=None)
    if matmul.dtype == "float64":
        # DMMA kernels load 8 bytes at a time anyway: their align1 is full speed.
        return Reading("native", "FP64 Tensor Core kernels need no more than 8 bytes", "", alignment, found, remarks)
    bad = sorted((layout for layout in found if not layout.is_aligned), key=lambda layout: layout.alignment_bytes)
    if not bad:
        return Reading(
            "native", "every row stride and base pointer is a multiple of 16 bytes", "", alignment, found, remarks
        )
    return Reading("degraded", _why(bad, ITEM_SIZES.get(matmul.dtype, 0)), "alignment", alignment, found, remarks)


def _why(bad: list[Layout], item: int) -> str:
    worst = bad[0]
    left = f"loads of {worst.alignment_bytes} bytes instead of 16"
    if item and worst.alignment_bytes >= item:
        left += f" (_align{worst.alignment_bytes // item})"
    also = f"; {' and '.join(layout.name for layout in bad[1:])} too" if len(bad) > 1 else ""
    return f"{_what(worst)}: {left}{also}"


def _what(layout: Layout) -> str:
    if layout.stride_bytes is not None and layout.stride_bytes % FULL_ALIGNMENT:
        over = layout.stride_bytes % FULL_ALIGNMENT
        return f"{layout.name}'s rows are {layout.stride_bytes:,} bytes apart, {over} more than a multiple of 16"
    if layout.offset_bytes and layout.offset_bytes % FULL_ALIGNMENT:
        return f"{layout.name} starts {layout.offset_bytes:,} bytes into its storage, which is no multiple of 16"
    return f"{layout.name}'s matrices of the batch are no multiple of 16 bytes apart"
