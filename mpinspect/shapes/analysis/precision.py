"""The dtype's part of the verdict: what a GPU's Tensor Cores multiply, and whether torch lets FP32 become TF32."""

from __future__ import annotations

from mpinspect.runtime.gpus import Gpu
from mpinspect.shapes.analysis.verdict import Reading
from mpinspect.shapes.records import Matmul

#: torch's defaults: torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32.
TF32_BY_DEFAULT = {"gemm": False, "attention": False, "convolution": True, "recurrent": True}


def precision_reading(matmul: Matmul, gpu: Gpu, tf32: bool | None) -> Reading | None:
    """A verdict where the dtype decides it: "off" or "unknown"; None where Tensor Cores multiply it."""
    if matmul.dtype.startswith("complex"):
        return Reading("unknown", "complex products: which kernel computes them is not known here", "complex")
    multiplies = gpu.multiplies(matmul.dtype)
    name = gpu.name or "this GPU"
    if multiplies is None:
        return Reading("unknown", f"what {name}'s Tensor Cores multiply is not known here", "gpu-unknown")
    if matmul.dtype == "float32":
        return _float32(matmul, multiplies, name, tf32)
    if multiplies:
        return None
    if matmul.dtype == "float64":
        return Reading("off", f"{name} multiplies FP64 on CUDA cores", "float64")
    return Reading("off", f"{name}'s Tensor Cores do not multiply {matmul.dtype}", "dtype")


def _float32(matmul: Matmul, multiplies: bool, name: str, tf32: bool | None) -> Reading | None:
    if not multiplies:
        return Reading("off", f"FP32, and {name} has no TF32", "float32")
    if matmul.attention is not None and matmul.attention.backend != "math":
        # torch's memory-efficient kernels compute FP32 attention as 3xTF32 from Ampere on, whatever the TF32 switch says.
        return None
    allowed = TF32_BY_DEFAULT.get(matmul.kind, False) if tf32 is None else tf32
    if allowed:
        return None
    default = " (torch's default)" if tf32 is None else ""
    return Reading("off", f"FP32, and TF32 is not allowed{default}: CUDA cores", "tf32-off")
