"""Why a product is off Tensor Cores or degraded: a key that products of one cause share, and a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow
from mpinspect.reporting.words import format_name


@dataclass(frozen=True, slots=True)
class Cause:
    """``id``: the key, as "tf32-off-cuBLAS"; ``sentence``: without a full stop."""

    id: str
    sentence: str


class Causes:
    """Finds causes; knows from the other rows whether their library was allowed TF32."""

    def __init__(self, rows: Iterable[KernelRow]) -> None:
        # A FP32 product on Tensor Cores shows that its library was allowed TF32 in that trace.
        self._tf32 = {
            (row.trace, library(row)) for row in rows if row.verdict in ON_TENSOR_CORES and row.dtype == "float32"
        }

    def of(self, row: KernelRow) -> Cause:
        """The cause of a row that is off or degraded."""
        if row.verdict == "degraded":
            return _of_degraded(row)
        if row.dtype == "float32":
            return self._of_float32(row)
        gpu, name = row.gpu.name or "this GPU", format_name(row.dtype)
        if row.gpu.multiplies(row.dtype) is False:
            return Cause(f"dtype-{row.dtype}", f"{name}: {gpu}'s Tensor Cores multiply FP16 instead")
        because = f": {row.shape.reason}" if row.shape is not None and row.shape.verdict != "native" else ""
        return Cause(
            f"cuda-cores-{row.dtype}", f"{name} on CUDA cores, though {gpu}'s Tensor Cores multiply it{because}"
        )

    def _of_float32(self, row: KernelRow) -> Cause:
        gpu, owner = row.gpu.name or "this GPU", library(row)
        if not row.gpu.multiplies("float32"):
            return Cause("fp32", f"FP32: {gpu}'s Tensor Cores multiply FP16, not FP32")
        though = f"FP32 on CUDA cores, though {gpu} multiplies TF32"
        if (row.trace, owner) in self._tf32:
            return Cause(f"tf32-not-chosen-{owner}", f"{though}, and did so for others: {owner} chose another kernel")
        default = "torch's default for matrix products" if owner == "cuBLAS" else "against torch's default"
        return Cause(f"tf32-off-{owner}", f"{though}: it was not allowed ({default}), or {owner} chose another kernel")


def library(row: KernelRow) -> str:
    """The library that chose the kernel, and whose TF32 switch counts: cuDNN for convolutions and recurrent networks."""
    is_cudnn = row.kind in ("convolution", "recurrent") or "conv" in row.op or "cudnn" in row.op
    return "cuDNN" if is_cudnn else "cuBLAS"


def _of_degraded(row: KernelRow) -> Cause:
    held_back = row.shape.reason if row.shape is not None and row.shape.verdict == "degraded" else ""
    if row.basis == "rate":
        # The rate tells that it was slow and the shape rule why: names of Hopper's and Blackwell's nvjet tell no alignment.
        return Cause("rate-alignment", f"{row.reason}; {held_back}") if held_back else Cause("rate", row.reason)
    # The shape rule names the operand and its stride; the kernel's name only what was left.
    return Cause("alignment", held_back or row.reason)
