"""Describe convolutions as implicit GEMMs, and their gradients.

M, N and K describe one group, as in "Convolutional Layers User's Guide" (NVIDIA, table "Translation of convolution
parameters to corresponding GEMM parameters"):

    forward  m = batch x output positions            n = out_channels    k = in_channels x kernel positions
    dgrad    m = batch x input positions             n = in_channels     k = out_channels x kernel positions
    wgrad    m = in_channels x kernel positions      n = out_channels    k = batch x output positions

A transposed convolution is the dgrad of the convolution from its output to its input. FLOPs count the elements that are
multiplied, the same number for all three; with a stride, a dgrad's implicit GEMM also multiplies zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mpinspect.shapes.operators.call import (
    Call,
    UnknownSizesError,
    channels_last,
    fresh,
    is_channels_last,
    leading,
    traffic,
)
from mpinspect.shapes.records import Convolution, Matmul, Operand


@dataclass(frozen=True, slots=True)
class _Scalars:
    """The positions of an operator's scalars among its arguments; None if there is no such argument: torch's default applies."""

    stride: int | None = None
    padding: int | None = None
    dilation: int | None = None
    groups: int | None = None
    transposed: int | bool = False
    output_padding: int | None = None
    bias: int | None = 2


_CONVOLUTION = _Scalars(stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8)
_CUDNN = _Scalars(padding=2, stride=3, dilation=4, groups=5, bias=None)
_PADDING_FIRST = _Scalars(padding=3, stride=4, dilation=5, groups=6)
_KERNEL_FIRST = _Scalars(bias=3, stride=4, padding=5, dilation=6)

_FORWARD: dict[str, _Scalars] = {
    "convolution": _CONVOLUTION,
    "_convolution": _CONVOLUTION,
    "convolution_overrideable": _CONVOLUTION,
    **{f"conv{dims}d": _Scalars(stride=3, padding=4, dilation=5, groups=6) for dims in (1, 2, 3)},
    "_convolution_mode": _Scalars(stride=3, padding=4, dilation=5, groups=6),
    **{
        f"conv_transpose{dims}d": _Scalars(stride=3, padding=4, output_padding=5, groups=6, dilation=7, transposed=True)
        for dims in (1, 2, 3)
    },
    "cudnn_convolution": _CUDNN,
    "cudnn_convolution_transpose": _Scalars(
        padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True, bias=None
    ),
    "cudnn_convolution_relu": _Scalars(stride=3, padding=4, dilation=5, groups=6),
    "cudnn_convolution_add_relu": _Scalars(stride=5, padding=6, dilation=7, groups=8, bias=4),
    "miopen_convolution": _PADDING_FIRST,
    "miopen_depthwise_convolution": _PADDING_FIRST,
    "miopen_convolution_transpose": _Scalars(
        padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True
    ),
    "mkldnn_convolution": _PADDING_FIRST,
    "_convolution_pointwise": _PADDING_FIRST,
    "_conv_depthwise2d": _KERNEL_FIRST,
    "conv_depthwise3d": _KERNEL_FIRST,
    "thnn_conv2d": _Scalars(bias=3, stride=4, padding=5),
    "_slow_conv2d_forward": _Scalars(bias=3, stride=4, padding=5),
    "slow_conv3d": _Scalars(bias=3, stride=4, padding=5),
    "slow_conv3d_forward": _Scalars(bias=3, stride=4, padding=5),
    "slow_conv_dilated2d": _KERNEL_FIRST,
    "slow_conv_dilated3d": _KERNEL_FIRST,
    "slow_conv_transpose2d": _Scalars(bias=3, stride=4, padding=5, output_padding=6, dilation=7, transposed=True),
    "slow_conv_transpose3d": _Scalars(bias=3, stride=4, padding=5, output_padding=6, dilation=7, transposed=True),
}

#: By operator: (scalars, position of the mask of requested gradients). Arguments begin with grad_output, input, weight.
_BACKWARD: dict[str, tuple[_Scalars, int]] = {
    "convolution_backward": (_Scalars(stride=4, padding=5, dilation=6, transposed=7, output_padding=8, groups=9), 10),
    "convolution_backward_overrideable": (_CONVOLUTION, 9),
    "_slow_conv2d_backward": (_Scalars(stride=4, padding=5), 6),
}


def convolution(call: Call, scalars: _Scalars) -> tuple[Matmul, ...]:
    """Return the record of any convolution operator's forward."""
    image, weight = call.tensor(0), call.tensor(1)
    batched, output = image, call.output
    if len(image.shape) == len(weight.shape) - 1:  # conv1d to 3d accept an image without a batch
        batched = leading(image)
    if output is not None and len(output.shape) != len(weight.shape):
        output = None
    geometry = _geometry(call, scalars, batched, weight, output)
    shape = (geometry.batch, geometry.out_channels, *geometry.output_size)
    out = output or _image(shape, image.dtype, batched, weight)
    bias = None
    if scalars.bias is not None:
        bias = call.optional(scalars.bias)
    groups, positions = geometry.groups, math.prod(geometry.kernel_size)
    sizes = (
        geometry.batch * math.prod(geometry.output_size),
        geometry.out_channels // groups,
        geometry.in_channels // groups * positions,
    )
    return (_record(call, "forward", sizes, geometry, (batched, weight, out), bias),)


def convolution_backward(call: Call, scalars: _Scalars, mask: int) -> tuple[Matmul, ...]:
    """Return the records of the gradients that a backward must compute; of both gradients if the mask is unknown."""
    grad, image, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    geometry = _geometry(call, scalars, image, weight, grad)
    wants = call.value(mask)
    if not isinstance(wants, (list, tuple)) or len(wants) < 2:
        wants = (True, True)
    groups, positions = geometry.groups, math.prod(geometry.kernel_size)
    ins, outs = geometry.in_channels // groups, geometry.out_channels // groups
    in_rows = geometry.batch * math.prod(geometry.input_size)
    out_rows = geometry.batch * math.prod(geometry.output_size)
    records = []
    if wants[0]:
        operands = (grad, weight, _image(image.shape, image.dtype, grad, weight))
        records.append(_record(call, "dgrad", (in_rows, ins, outs * positions), geometry, operands))
    if wants[1]:
        # Patches are gathered from the image with more positions: the input, or a transposed convolution's output.
        sizes, gathered, other = (ins * positions, outs, out_rows), image, grad
        if geometry.transposed:
            sizes, gathered, other = (outs * positions, ins, in_rows), grad, image
        out = Operand(weight.shape, weight.strides, weight.dtype)
        records.append(_record(call, "wgrad", sizes, geometry, (gathered, other, out)))
    return tuple(records)


def time_convolution(call: Call) -> tuple[Matmul, ...]:
    """Return the record of conv_tbc(self, weight, bias, pad): image (time, batch, channels), weight (kernel, in, out)."""
    image, weight, pad = call.tensor(0, 3), call.tensor(1, 3), call.integer(3, 0)
    time, batch, ins = image.shape
    kernel, weight_ins, outs = weight.shape
    length = time + 2 * pad - kernel + 1
    if weight_ins != ins or length < 1:
        raise UnknownSizesError
    geometry = Convolution(batch, ins, outs, 1, (time,), (length,), (kernel,), (1,), (pad,), (1,), False, True)
    out = call.output or fresh((length, batch, outs), image.dtype)
    return (_record(call, "forward", (batch * length, outs, ins * kernel), geometry, (image, weight, out)),)


def _geometry(call: Call, scalars: _Scalars, image: Operand, weight: Operand, output: Operand | None) -> Convolution:
    dims = len(weight.shape) - 2
    if dims < 1 or len(image.shape) != dims + 2:
        raise UnknownSizesError
    transposed = scalars.transposed
    if not isinstance(transposed, bool):
        transposed = call.flag(transposed)
    in_channels = image.shape[1]
    groups = _groups(call, scalars, in_channels, weight, transposed)
    out_channels = weight.shape[0]
    if transposed:
        out_channels = weight.shape[1] * groups
    stride = _spatial(call, scalars.stride, dims, 1, output)
    dilation = _spatial(call, scalars.dilation, dims, 1, output)
    kernel, size = weight.shape[2:], image.shape[2:]
    padding = _padding(call, scalars.padding, kernel, dilation, output)
    if output is not None:
        if len(output.shape) != dims + 2:
            raise UnknownSizesError
        positions = output.shape[2:]
    else:
        extra = _spatial(call, scalars.output_padding, dims, 0, None)
        positions = _output_size(size, kernel, stride, padding, dilation, extra if transposed else None)
    if min(positions) < 0 or groups < 1:
        raise UnknownSizesError
    return Convolution(
        batch=image.shape[0],
        in_channels=in_channels,
        out_channels=out_channels,
        groups=groups,
        input_size=size,
        output_size=positions,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        channels_last=is_channels_last(image),
    )


def _groups(call: Call, scalars: _Scalars, in_channels: int, weight: Operand, transposed: bool) -> int:
    """Return the groups as passed, else derived from the weight, which has one group's input channels unless transposed."""
    told = _passed(call, scalars.groups)
    if isinstance(told, int):
        groups = int(told)
    elif transposed or not weight.shape[1]:
        groups = 1
    else:
        groups = in_channels // weight.shape[1]
    of_weight = weight.shape[0] if transposed else weight.shape[1] * groups
    if groups < 1 or of_weight != in_channels:
        raise UnknownSizesError
    return groups


def _passed(call: Call, place: int | None) -> object:
    return None if place is None else call.value(place)


def _spatial(call: Call, place: int | None, dims: int, default: int, output: Operand | None) -> tuple[int, ...]:
    """Return the sizes as passed, the default if they were left out, or () if they are unknown and not needed."""
    if place is None or 0 < len(call.scalars) <= place:
        return (default,) * dims
    if output is not None and call.value(place) is None:
        return ()
    return call.sizes(place, dims)


def _padding(
    call: Call, place: int | None, kernel: tuple[int, ...], dilation: tuple[int, ...], output: Operand | None
) -> tuple[int, ...]:
    told = _passed(call, place)
    if told == "valid":
        return (0,) * len(kernel)
    if told == "same" and dilation:
        return tuple(step * (size - 1) // 2 for size, step in zip(kernel, dilation, strict=True))
    return _spatial(call, place, len(kernel), 0, output)


def _output_size(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Return the result's positions, as torch.nn.Conv2d or, with ``output_padding``, torch.nn.ConvTranspose2d computes them."""
    if 0 in stride:
        raise UnknownSizesError
    axes = zip(size, kernel, stride, padding, dilation, strict=True)
    if output_padding is None:
        return tuple((i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in axes)
    rows = zip(axes, output_padding, strict=True)
    return tuple((i - 1) * s - 2 * p + d * (k - 1) + extra + 1 for (i, k, s, p, d), extra in rows)


def _image(shape: tuple[int, ...], dtype: str, *deciding: Operand) -> Operand:
    """Return a result as cuDNN allocates it: NHWC if any operand is NHWC (cudnn_conv_suggest_memory_format, ConvUtils.h)."""
    if any(is_channels_last(one) for one in deciding):
        return Operand(shape, channels_last(shape), dtype)
    return fresh(shape, dtype)


def _record(
    call: Call,
    role: str,
    sizes: tuple[int, int, int],
    geometry: Convolution,
    operands: tuple[Operand, Operand, Operand],
    bias: Operand | None = None,
) -> Matmul:
    a, b, out = operands
    m, n, k = sizes
    slid = geometry.input_size if geometry.transposed else geometry.output_size
    pairs = geometry.in_channels * geometry.out_channels // geometry.groups
    flops = 2 * geometry.batch * math.prod(slid) * math.prod(geometry.kernel_size) * pairs
    return Matmul(
        op=call.op,
        kind="convolution",
        role=role,
        m=m,
        n=n,
        k=k,
        batch=geometry.groups,
        dtype=a.dtype,
        flops=flops,
        bytes=traffic(a, b, bias, out),
        a=a,
        b=b,
        out=out,
        convolution=geometry,
    )


#: By name without the namespace.
FAMILY: dict[str, Callable[[Call], tuple[Matmul, ...]]] = {
    **{name: partial(convolution, scalars=scalars) for name, scalars in _FORWARD.items()},
    **{name: partial(convolution_backward, scalars=scalars, mask=mask) for name, (scalars, mask) in _BACKWARD.items()},
}
