"""One product, one GPU, two verdicts."""

from __future__ import annotations

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.alignment import PREFERRED_ALIGNMENT, PREFERRING_ARCHITECTURES
from mpinspect.shapes.analysis.attention import attention_reading
from mpinspect.shapes.analysis.convolution import convolution_reading
from mpinspect.shapes.analysis.gemm import gemm_reading, nothing_to_multiply
from mpinspect.shapes.analysis.precision import precision_reading
from mpinspect.shapes.analysis.raising import raising_reading
from mpinspect.shapes.analysis.talk import multiples_of_8
from mpinspect.shapes.analysis.verdict import Reading, ShapeVerdict
from mpinspect.shapes.records import Matmul

_BY_KIND = {"convolution": convolution_reading, "attention": attention_reading}


def judge(matmul: Matmul, gpu: Gpu, *, tf32: bool | None = None) -> ShapeVerdict:
    """Whether a product's shapes and dtype suit the Tensor Cores of a GPU, and what the talk's rule says.

    Args:
        tf32: whether torch allows TF32 for FP32 products of this kind; None: torch's defaults are assumed (no for matrix
            products, yes for convolutions and recurrent networks), which the verdict says.

    Strides that are not known are taken as those of contiguous tensors, which the verdict says too. Raises for no product.
    """
    reading = _reading(matmul, gpu, tf32)
    remarks = list(reading.remarks)
    if any(layout.is_assumed for layout in reading.layouts):
        remarks.append("strides unknown: taken as contiguous")
    if reading.verdict == "native" and _wants_more(reading, gpu):
        remarks.append(f"aligned to {reading.alignment_bytes} bytes; A100 and later prefer {PREFERRED_ALIGNMENT}")
    return ShapeVerdict(
        verdict=reading.verdict,
        reason=reading.reason,
        multiples_of_8=multiples_of_8(matmul),
        stride_bytes={layout.name: layout.stride_bytes for layout in reading.layouts},
        alignment_bytes=reading.alignment_bytes,
        cause=reading.cause,
        remarks=tuple(remarks),
        layouts=reading.layouts,
    )


def _reading(matmul: Matmul, gpu: Gpu, tf32: bool | None) -> Reading:
    """The first rule that decides."""
    return (
        # What torch refused while it ran has no verdict of a GPU's.
        (raising_reading(matmul, gpu) if matmul.raises else None)
        or _of_the_gpu(gpu)
        or raising_reading(matmul, gpu)
        or nothing_to_multiply(matmul)
        or precision_reading(matmul, gpu, tf32)
        or _BY_KIND.get(matmul.kind, gemm_reading)(matmul, gpu)
    )


def _of_the_gpu(gpu: Gpu) -> Reading | None:
    if gpu.has_tensor_cores is None:
        vendor = f" ({gpu.vendor})" if gpu.vendor not in ("", "NVIDIA") else ""
        return Reading(
            "unknown", f"whether {gpu.name or 'the GPU'}{vendor} has Tensor Cores is not known here", "gpu-unknown"
        )
    if not gpu.has_tensor_cores:
        return Reading("off", f"{gpu.name or 'this GPU'} has no Tensor Cores", "gpu-without")
    return None


def _wants_more(reading: Reading, gpu: Gpu) -> bool:
    alignment = reading.alignment_bytes
    return gpu.architecture in PREFERRING_ARCHITECTURES and alignment is not None and alignment < PREFERRED_ALIGNMENT
