"""Scaled dot-product attention in one operator: what torch's fused kernels ask of sizes and strides.

Source: torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cu: head dimensions are padded to multiples
of 8 (a copy of query, key, value and output), flash attention ends at 256, an additive mask's rows are padded to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, Layout, layout_of
from mpinspect.shapes.analysis.verdict import Reading
from mpinspect.shapes.records import ITEM_SIZES, Attention, Matmul

MAX_FLASH_HEAD_DIM = 256
#: torch's flash attention is built for sm80 and later (check_sm_version in sdp_utils.cpp).
_WITHOUT_FLASH = ("volta", "turing")
_FLASH, _EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"

_NAMES = {"efficient": "memory-efficient"}
_TRIPLE = (
    "FP32 attention: memory-efficient kernels compute three TF32 products for each (3xTF32), a third of TF32's rate"
)


def has_flash_attention(gpu: Gpu) -> bool:
    """Whether torch's flash attention runs on a GPU; taken for granted where its architecture is not known."""
    return gpu.architecture not in _WITHOUT_FLASH


def taken_on(matmul: Matmul, gpu: Gpu) -> Matmul:
    """Fused attention as a GPU computes it: a recorder knows no GPU, and names flash attention whatever it is for."""
    attention = matmul.attention
    if attention is None or attention.backend != "flash" or has_flash_attention(gpu):
        return matmul
    return replace(matmul, op=matmul.op.replace(_FLASH, _EFFICIENT), attention=replace(attention, backend="efficient"))


def attention_reading(matmul: Matmul, gpu: Gpu) -> Reading:
    """Whether the fused kernels take the operands as they are."""
    matmul = taken_on(matmul, gpu)
    attention = matmul.attention
    item = ITEM_SIZES.get(matmul.dtype)
    if attention is None or item is None:
        return Reading("unknown", "the attention's sizes are not known", "unknown")
    found = tuple(_layouts(matmul))
    remarks = tuple(_remarks(matmul, attention))
    alignment = min((layout.alignment_bytes for layout in found), default=None)
    if matmul.dtype == "float64":
        return Reading("native", "FP64: no fused kernel; unfused products need 8 bytes", "", alignment, found, remarks)
    heads = [f"{name} {size}" for name, size in _head_sizes(attention).items() if size * item % FULL_ALIGNMENT]
    if heads:
        what = "torch pads copies of query, key and value"
        if not has_flash_attention(gpu):
            what = "torch's memory-efficient kernel does not take that, and flash attention needs Ampere or later"
        why = f"{' and '.join(heads)}: no multiple of {FULL_ALIGNMENT // item}, {what}"
        return Reading("degraded", why, "head-dim", alignment, found, remarks)
    if _bias_is_misaligned(attention):
        why = f"the mask's rows are no multiple of {FULL_ALIGNMENT} bytes apart: torch copies it padded"
        return Reading("degraded", why, "attention-bias", alignment, found, remarks)
    bad = [layout.name for layout in found if not layout.is_aligned]
    if bad:
        why = f"{' and '.join(bad)}: a view that is not aligned to 16 bytes, torch copies it or takes a slower kernel"
        return Reading("degraded", why, "alignment", alignment, found, remarks)
    kernels = f"{_NAMES.get(attention.backend, attention.backend)} attention" if attention.backend else "a fused kernel"
    if not has_flash_attention(gpu) and attention.backend == "efficient":
        kernels += " (torch's flash attention needs Ampere or later)"
    return Reading(
        "native", f"{kernels}: head sizes and strides are multiples of 16 bytes", "", alignment, found, remarks
    )


def _layouts(matmul: Matmul) -> Iterator[Layout]:
    for name, operand in (("A", matmul.a), ("B", matmul.b), ("output", matmul.out)):
        layout = None if operand is None else layout_of(name, operand)
        if layout is not None:
            yield layout


def _head_sizes(attention: Attention) -> dict[str, int]:
    sizes = {"head_dim": attention.head_dim}
    return sizes if attention.value_dim == attention.head_dim else sizes | {"value_dim": attention.value_dim}


def _bias_is_misaligned(attention: Attention) -> bool:
    layout = None if attention.bias is None else layout_of("bias", attention.bias)
    return layout is not None and (layout.stride_bytes or 0) % FULL_ALIGNMENT != 0


def _remarks(matmul: Matmul, attention: Attention) -> Iterator[str]:
    if matmul.dtype == "float32":
        yield _TRIPLE
    if max(attention.head_dim, attention.value_dim) > MAX_FLASH_HEAD_DIM and attention.backend in ("", "flash"):
        yield f"heads above {MAX_FLASH_HEAD_DIM} are beyond flash attention: torch takes another kernel, or none"
