"""Today's rule for each kind of product: full speed needs base pointers, strides and channels in multiples of 16 bytes.

Convolutions: NVIDIA's Convolutional Layers guide (channels in multiples of 8 for FP16, 4 for TF32; cuDNN pads other numbers
itself and transposes NCHW to NHWC with extra kernels, nchwToNhwc in traces). Attention: torch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cu (torch pads heads to multiples of 8 by copying query,
key, value and output; flash attention supports heads up to 256; torch pads an additive mask's rows to 16 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mpinspect.reporting.words import filled, number_of
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, PREFERRED_ALIGNMENT, Layout, layout_of, layouts
from mpinspect.shapes.analysis.verdict import ShapeVerdict
from mpinspect.shapes.records import ITEM_SIZES, Attention, Convolution, Matmul, Operand

#: Maximum number of input channels of cuDNN's special first-layer kernels.
STEM_CHANNELS = 4
MAX_FLASH_HEAD_DIM = 256
#: torch's flash attention is built for sm80 and later (check_sm_version in sdp_utils.cpp).
_WITHOUT_FLASH = ("volta", "turing")
_FLASH, _EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


# -- matrix products -------------------------------------------------------------------------------------------------------


def gemm_reading(matmul: Matmul, gpu: Gpu) -> ShapeVerdict:
    """Return whether A, B and output are aligned (base pointers, row and batch strides); the reason names the worst one."""
    found = layouts(matmul)
    remarks = tuple(
        f"{layout.name} has no dimension of stride 1: torch copies it first" for layout in found if layout.is_copied
    )
    alignment = min((layout.alignment_bytes for layout in found), default=None)
    reading = partial(ShapeVerdict, alignment_bytes=alignment, layouts=found, remarks=remarks)
    if matmul.dtype == "float64":
        # DMMA kernels load 8 bytes at a time in any case: their align1 variant runs at full speed.
        return reading("native", "FP64 Tensor Core kernels need no more than 8 bytes")
    bad = sorted((layout for layout in found if not layout.is_aligned), key=lambda layout: layout.alignment_bytes)
    if not bad:
        return reading("native", "every row stride and base pointer is a multiple of 16 bytes")
    return reading("degraded", _why(bad, ITEM_SIZES.get(matmul.dtype, 0)), "alignment")


def _why(bad: list[Layout], item: int) -> str:
    worst = bad[0]
    left = f"loads of {worst.alignment_bytes} bytes instead of 16"
    if item and worst.alignment_bytes >= item:
        left += f" (_align{worst.alignment_bytes // item})"
    also = filled("; {} too", " and ".join(layout.name for layout in bad[1:]))
    return f"{_what(worst)}: {left}{also}"


def _what(layout: Layout) -> str:
    if layout.stride_bytes is not None and layout.stride_bytes % FULL_ALIGNMENT:
        over = layout.stride_bytes % FULL_ALIGNMENT
        return f"{layout.name}'s rows are {layout.stride_bytes:,} bytes apart, {over} more than a multiple of 16"
    if layout.offset_bytes and layout.offset_bytes % FULL_ALIGNMENT:
        return f"{layout.name} starts {layout.offset_bytes:,} bytes into its storage, which is not a multiple of 16"
    return f"{layout.name}'s matrices of the batch are not a multiple of 16 bytes apart"


# -- convolutions ----------------------------------------------------------------------------------------------------------


def convolution_reading(matmul: Matmul, gpu: Gpu) -> ShapeVerdict:
    """Return whether the input and output channels of each group are multiples of 16 bytes."""
    convolution = matmul.convolution
    item = ITEM_SIZES.get(matmul.dtype)
    if convolution is None or item is None:
        return ShapeVerdict("unknown", "the convolution's geometry is not known", "unknown")
    channels = convolution.group_channels
    offsets = [operand.offset or 0 for operand in (matmul.a, matmul.b, matmul.out) if operand is not None]
    alignment = math.gcd(PREFERRED_ALIGNMENT, *(size * item for size in (*channels.values(), *offsets)))
    remarks: tuple[str, ...] = ()
    if is_nchw(matmul):
        remarks = ("stored NCHW: cuDNN transposes to NHWC and back, at the cost of memory traffic",)
    reading = partial(ShapeVerdict, alignment_bytes=alignment, remarks=remarks)
    bad = {name: size for name, size in channels.items() if size * item % FULL_ALIGNMENT}
    if matmul.dtype == "float64" or not bad:
        return reading("native", "channels are multiples of 16 bytes")
    if is_stem(convolution):
        why = (
            f"{number_of(channels['C_in'], 'input channel')}: cuDNN pads them or takes a kernel made for first layers, "
            "both slower than an ordinary layer"
        )
        return reading("degraded", why, "stem")
    which = " and ".join(f"{name} {size:,} ({size * item:,} bytes)" for name, size in bad.items())
    if convolution.groups > 1:
        which += " of a group"
    why = f"{which}: not a multiple of 16 bytes, cuDNN pads or takes a slower kernel"
    return reading("degraded", why, "channels")


def is_nchw(matmul: Matmul) -> bool:
    """Return whether cuDNN gets NCHW tensors. One channels-last tensor, image or weight, is enough for torch to use NHWC
    (cudnn_conv_suggest_memory_format in aten/src/ATen/native/ConvUtils.h)."""
    if matmul.convolution is None or matmul.convolution.channels_last is not False:
        return False
    return not any(_is_channels_last(operand) for operand in (matmul.a, matmul.b, matmul.out))


def _is_channels_last(operand: Operand | None) -> bool:
    """Return whether channels have stride 1 and the last dimension's stride is the number of channels."""
    if (
        operand is None
        or operand.strides is None
        or len(operand.shape) < 3
        or len(operand.strides) != len(operand.shape)
    ):
        return False
    return operand.shape[1] > 1 and operand.strides[1] == 1 and operand.strides[-1] == operand.shape[1]


def is_stem(convolution: Convolution) -> bool:
    """Return whether a convolution reads an image: up to 4 input channels, one group, not transposed."""
    return convolution.groups == 1 and convolution.in_channels <= STEM_CHANNELS and not convolution.transposed


# -- attention -------------------------------------------------------------------------------------------------------------


def has_flash_attention(gpu: Gpu) -> bool:
    """Return whether torch's flash attention runs on a GPU; True if the GPU's architecture is not known."""
    return gpu.architecture not in _WITHOUT_FLASH


def taken_on(matmul: Matmul, gpu: Gpu) -> Matmul:
    """Return fused attention as this GPU computes it: the recorder does not know the GPU and always names flash attention."""
    attention = matmul.attention
    if attention is None or attention.backend != "flash" or has_flash_attention(gpu):
        return matmul
    return replace(matmul, op=matmul.op.replace(_FLASH, _EFFICIENT), attention=replace(attention, backend="efficient"))


def attention_reading(matmul: Matmul, gpu: Gpu) -> ShapeVerdict:
    """Return whether the fused kernels accept the operands without a copy."""
    matmul = taken_on(matmul, gpu)
    attention = matmul.attention
    item = ITEM_SIZES.get(matmul.dtype)
    if attention is None or item is None:
        return ShapeVerdict("unknown", "the attention's sizes are not known", "unknown")
    found = tuple(_layouts(matmul))
    remarks = tuple(_remarks(matmul, attention))
    alignment = min((layout.alignment_bytes for layout in found), default=None)
    reading = partial(ShapeVerdict, alignment_bytes=alignment, layouts=found, remarks=remarks)
    if matmul.dtype == "float64":
        return reading("native", "FP64: no fused kernel; unfused products need 8 bytes")
    heads = [f"{name} {size}" for name, size in _head_sizes(attention).items() if size * item % FULL_ALIGNMENT]
    if heads:
        what = "torch pads copies of query, key and value"
        if not has_flash_attention(gpu):
            what = "torch's memory-efficient kernel does not take that, and flash attention needs Ampere or later"
        why = f"{' and '.join(heads)}: not a multiple of {FULL_ALIGNMENT // item}, {what}"
        return reading("degraded", why, "head-dim")
    if _bias_is_misaligned(attention):
        why = f"the mask's rows are not a multiple of {FULL_ALIGNMENT} bytes apart: torch copies it padded"
        return reading("degraded", why, "attention-bias")
    bad = [layout.name for layout in found if not layout.is_aligned]
    if bad:
        why = f"{' and '.join(bad)}: a view that is not aligned to 16 bytes, torch copies it or takes a slower kernel"
        return reading("degraded", why, "alignment")
    backend = attention.backend.replace("efficient", "memory-efficient")
    kernels = filled("{} attention", backend) or "a fused kernel"
    if not has_flash_attention(gpu) and attention.backend == "efficient":
        kernels += " (torch's flash attention needs Ampere or later)"
    return reading("native", f"{kernels}: head sizes and strides are multiples of 16 bytes")


def _layouts(matmul: Matmul) -> Iterator[Layout]:
    for name, operand in (("A", matmul.a), ("B", matmul.b), ("output", matmul.out)):
        if operand is not None and (layout := layout_of(name, operand)) is not None:
            yield layout


def _head_sizes(attention: Attention) -> dict[str, int]:
    sizes = {"head_dim": attention.head_dim}
    if attention.value_dim != attention.head_dim:
        sizes["value_dim"] = attention.value_dim
    return sizes


def _bias_is_misaligned(attention: Attention) -> bool:
    if attention.bias is None or (layout := layout_of("bias", attention.bias)) is None:
        return False
    return (layout.stride_bytes or 0) % FULL_ALIGNMENT != 0


def _remarks(matmul: Matmul, attention: Attention) -> Iterator[str]:
    if matmul.dtype == "float32":
        yield "FP32 attention: memory-efficient kernels compute three TF32 products for each (3xTF32), a third of TF32's rate"
    if max(attention.head_dim, attention.value_dim) > MAX_FLASH_HEAD_DIM and attention.backend in ("", "flash"):
        yield f"heads above {MAX_FLASH_HEAD_DIM} are beyond flash attention: torch takes another kernel, or none"
