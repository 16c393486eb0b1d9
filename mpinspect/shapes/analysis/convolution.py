"""Convolutions: channels, as cuDNN's Tensor Core kernels see them (NHWC), and layouts.

Source: NVIDIA's Convolutional Layers guide (channels in multiples of 8 for FP16, 4 for TF32; cuDNN pads others itself; NCHW is
transposed to NHWC by extra kernels, nchwToNhwc in traces).
"""

from __future__ import annotations

import math

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import FULL_ALIGNMENT, PREFERRED_ALIGNMENT
from mpinspect.shapes.analysis.verdict import Reading
from mpinspect.shapes.analysis.wording import count
from mpinspect.shapes.records import ITEM_SIZES, Convolution, Matmul, Operand

#: Input channels up to which cuDNN has kernels of its own for a network's first layer.
STEM_CHANNELS = 4

_NCHW = "stored NCHW: cuDNN transposes to NHWC and back, at the cost of memory traffic"


def convolution_reading(matmul: Matmul, gpu: Gpu) -> Reading:
    """Whether a group's input and output channels, in bytes, are multiples of 16."""
    convolution = matmul.convolution
    item = ITEM_SIZES.get(matmul.dtype)
    if convolution is None or item is None:
        return Reading("unknown", "the convolution's geometry is not known", "unknown")
    channels = group_channels(convolution)
    offsets = [operand.offset or 0 for operand in (matmul.a, matmul.b, matmul.out) if operand is not None]
    alignment = math.gcd(PREFERRED_ALIGNMENT, *(size * item for size in (*channels.values(), *offsets)))
    remarks = (_NCHW,) if is_nchw(matmul) else ()
    bad = {name: size for name, size in channels.items() if size * item % FULL_ALIGNMENT}
    if matmul.dtype == "float64" or not bad:
        return Reading("native", "channels are multiples of 16 bytes", "", alignment, (), remarks)
    if is_stem(convolution):
        why = (
            f"{count(channels['C_in'], 'input channel')}: cuDNN pads them or takes a kernel made for first layers, "
            "both slower than an ordinary layer"
        )
        return Reading("degraded", why, "stem", alignment, (), remarks)
    which = " and ".join(f"{name} {size:,} ({size * item:,} bytes)" for name, size in bad.items())
    a_group = " of a group" if convolution.groups > 1 else ""
    why = f"{which}{a_group}: no multiple of 16 bytes, cuDNN pads or takes a slower kernel"
    return Reading("degraded", why, "channels", alignment, (), remarks)


def group_channels(convolution: Convolution) -> dict[str, int]:
    """Input and output channels of one group."""
    groups = max(convolution.groups, 1)
    return {"C_in": convolution.in_channels // groups, "C_out": convolution.out_channels // groups}


def is_nchw(matmul: Matmul) -> bool:
    """Whether cuDNN is given NCHW: neither the image nor the weight is stored channels-last, for one of them is enough for torch
    to compute in that layout (cudnn_conv_suggest_memory_format in aten/src/ATen/native/ConvUtils.h)."""
    if matmul.convolution is None or matmul.convolution.channels_last is not False:
        return False
    return not any(_is_channels_last(operand) for operand in (matmul.a, matmul.b, matmul.out))


def _is_channels_last(operand: Operand | None) -> bool:
    """Channels of stride 1, and neighbouring positions all channels apart."""
    if (
        operand is None
        or operand.strides is None
        or len(operand.shape) < 3
        or len(operand.strides) != len(operand.shape)
    ):
        return False
    return operand.shape[1] > 1 and operand.strides[1] == 1 and operand.strides[-1] == operand.shape[1]


def is_stem(convolution: Convolution) -> bool:
    """Whether it reads an image: up to 4 input channels, one group."""
    return convolution.groups == 1 and convolution.in_channels <= STEM_CHANNELS and not convolution.transposed
