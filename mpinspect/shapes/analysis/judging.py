"""Judge one product on one GPU by two rules; refusals, the GPU and the dtype are checked before strides.

Sources of the refusals: torch's aten/src/ATen/native/cuda/Blas.cpp, ScaledBlas.cpp and GroupedBlas.cpp, and their checks in
torch/_meta_registrations.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpinspect.reporting.words import filled
from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import (
    FULL_ALIGNMENT,
    PREFERRED_ALIGNMENT,
    PREFERRING_ARCHITECTURES,
    layouts,
    up_to,
)
from mpinspect.shapes.analysis.todays_rule import attention_reading, convolution_reading, gemm_reading
from mpinspect.shapes.analysis.verdict import ShapeVerdict, multiples_of_8
from mpinspect.shapes.records import Matmul, Operand, contiguous_strides

_BY_KIND = {"convolution": convolution_reading, "attention": attention_reading}
#: torch's defaults: torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32.
_TF32_BY_DEFAULT = {"gemm": False, "attention": False, "convolution": True, "recurrent": True}


def judge(matmul: Matmul, gpu: Gpu, *, tf32: bool | None = None) -> ShapeVerdict:
    """Judge whether a product's shapes and dtype suit a GPU's Tensor Cores and obey the talk's rule.

    Args:
        tf32: whether torch allows TF32 for FP32 products of this kind. None assumes torch's defaults (no for matrix
            products, yes for convolutions and recurrent networks), and a remark in the verdict mentions this.

    Unknown strides are assumed to be contiguous, also with a remark. No product raises an exception.
    """
    reading = _reading(matmul, gpu, tf32)
    remarks = list(reading.remarks)
    if any(layout.is_assumed for layout in reading.layouts):
        remarks.append("strides unknown: taken as contiguous")
    if reading.verdict == "native" and _wants_more(reading, gpu):
        remarks.append(f"aligned to {reading.alignment_bytes} bytes; A100 and later prefer {PREFERRED_ALIGNMENT}")
    strides = {layout.name: layout.stride_bytes for layout in reading.layouts}
    return replace(reading, multiples_of_8=multiples_of_8(matmul), stride_bytes=strides, remarks=tuple(remarks))


def _reading(matmul: Matmul, gpu: Gpu, tf32: bool | None) -> ShapeVerdict:
    """Return the verdict by today's rule: of the first rule that applies."""
    raising = _raising_reading(matmul, gpu)
    if raising and matmul.raises:
        # If torch refused a product during recording, no GPU computes it.
        return raising
    return (
        _of_the_gpu(gpu)
        or raising
        or _nothing_to_multiply(matmul)
        or _precision_reading(matmul, gpu, tf32)
        or _BY_KIND.get(matmul.kind, gemm_reading)(matmul, gpu)
    )


def _nothing_to_multiply(matmul: Matmul) -> ShapeVerdict | None:
    """Return "off" for products that no Tensor Core speeds up at any size: empty, matrix-vector, depthwise."""
    if 0 in (matmul.m, matmul.n, matmul.k, matmul.batch):
        return ShapeVerdict("off", "an empty product: nothing is computed", "empty")
    if matmul.convolution is not None:
        if matmul.convolution.is_depthwise:
            return ShapeVerdict(
                "off",
                "a depthwise convolution has no matrix product in it: memory-bound, no change expected",
                "depthwise",
            )
        return None
    if matmul.attention is None and matmul.k == 1:
        return ShapeVerdict(
            "off", "an outer product (K 1): bound by writing its result, no change expected", "matrix-vector"
        )
    if matmul.attention is None and 1 in (matmul.m, matmul.n):
        return ShapeVerdict(
            "off",
            f"matrix-vector (M {matmul.m:,}, N {matmul.n:,}): memory-bound, a gemv or a Tensor Core kernel takes "
            "equally long; no change expected",
            "matrix-vector",
        )
    return None


def _of_the_gpu(gpu: Gpu) -> ShapeVerdict | None:
    if gpu.has_tensor_cores is None:
        vendor = filled(" ({})", gpu.vendor.replace("NVIDIA", ""))
        return ShapeVerdict(
            "unknown", f"whether {gpu.name or 'the GPU'}{vendor} has Tensor Cores is unknown", "gpu-unknown"
        )
    if not gpu.has_tensor_cores:
        return ShapeVerdict("off", f"{gpu.name or 'this GPU'} has no Tensor Cores", "gpu-without")
    return None


def _wants_more(reading: ShapeVerdict, gpu: Gpu) -> bool:
    alignment = reading.alignment_bytes
    return gpu.architecture in PREFERRING_ARCHITECTURES and alignment is not None and alignment < PREFERRED_ALIGNMENT


def _raising_reading(matmul: Matmul, gpu: Gpu) -> ShapeVerdict | None:
    """Return "off" for a product that torch refuses on this GPU because of its sizes, layouts or dtypes; else None."""
    why = matmul.raises
    if faults := list(_faults(matmul, gpu)):
        why = f"{matmul.op.removeprefix('aten::')} needs {'; '.join(faults)}"
    if not why:
        return None
    return ShapeVerdict("off", f"torch raises: {why}", "raises")


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


def _precision_reading(matmul: Matmul, gpu: Gpu, tf32: bool | None) -> ShapeVerdict | None:
    """Return "off" or "unknown" if Tensor Cores are not known to multiply the product's dtype; None if they multiply it."""
    if matmul.dtype.startswith("complex"):
        return ShapeVerdict("unknown", "complex products: the kernel that computes them is unknown", "complex")
    multiplies = gpu.multiplies(matmul.dtype)
    name = gpu.name or "this GPU"
    if multiplies is None:
        return ShapeVerdict("unknown", f"the dtypes that {name}'s Tensor Cores multiply are unknown", "gpu-unknown")
    if matmul.dtype == "float32":
        return _float32(matmul, multiplies, name, tf32)
    if multiplies:
        return None
    if matmul.dtype == "float64":
        return ShapeVerdict("off", f"{name} multiplies FP64 on CUDA cores", "float64")
    return ShapeVerdict("off", f"{name}'s Tensor Cores do not multiply {matmul.dtype}", "dtype")


def _float32(matmul: Matmul, multiplies: bool, name: str, tf32: bool | None) -> ShapeVerdict | None:
    if not multiplies:
        return ShapeVerdict("off", f"FP32, and {name} has no TF32", "float32")
    if matmul.attention is not None and matmul.attention.backend != "math":
        # torch's memory-efficient kernels compute FP32 attention as 3xTF32 from Ampere on, whatever the TF32 switch.
        return None
    default = ""
    if tf32 is None:
        tf32, default = _TF32_BY_DEFAULT.get(matmul.kind, False), " (torch's default)"
    if tf32:
        return None
    return ShapeVerdict("off", f"FP32, and TF32 is not allowed{default}: CUDA cores", "tf32-off")
