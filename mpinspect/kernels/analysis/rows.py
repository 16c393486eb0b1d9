"""KernelRow: one run of a kernel with what its name says, its product and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpinspect.kernels.records import Kernel

if TYPE_CHECKING:
    from mpinspect.kernels.names import KernelVerdict
    from mpinspect.runtime.gpus import Gpu
    from mpinspect.shapes.analysis import ShapeVerdict
    from mpinspect.shapes.records import Matmul

#: Every verdict, best first; the first four are those of matrix products.
VERDICTS = ("native", "degraded", "off", "unknown", "helper", "other")
PRODUCTS = VERDICTS[:4]
ON_TENSOR_CORES = VERDICTS[:2]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One run of a kernel.

    Args:
        kernel: as the trace has it.
        named: the verdict by its name alone.
        gpu: the GPU that it was judged for.
        trace: index of its trace (``report.ranks``).
        verdict: one of VERDICTS: the name's, unless the operator or the rate says otherwise.
        reason: a sentence on the verdict.
        basis: where the verdict comes from: "name", "operator" (the call that launched the kernel, where the name says nothing
            or cannot be right), or "rate" (an estimate: FLOPs from shapes over measured time).
        dtype: dtype of the product's operands ("bfloat16") by the operator's arguments, else by the name; "" where unknown.
        matmul: its operator's product; None where it is no product or the trace lacks shapes.
        flops: operations of this run; None where unknown (several products in one call that no name tells apart).
        shape: the shape rule's verdict on that product; None without a product.
    """

    kernel: Kernel
    named: KernelVerdict
    gpu: Gpu
    trace: int
    verdict: str
    reason: str
    basis: str = "name"
    dtype: str = ""
    matmul: Matmul | None = None
    flops: float | None = None
    shape: ShapeVerdict | None = None

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def time_us(self) -> float:
        return self.kernel.time_us

    @property
    def op(self) -> str:
        """Name of the operator that launched it, the product's for a matrix product ("aten::addmm"); "" where unknown."""
        op = (self.kernel.matmul_op if self.is_product else None) or self.kernel.op
        return op.name if op is not None else ""

    @property
    def module(self) -> str:
        """Dotted path of the module, or its chain of classes by the trace's Python stack; "" where unknown."""
        return self.kernel.module

    @property
    def phase(self) -> str:
        return self.kernel.phase

    @property
    def device(self) -> int:
        return self.kernel.device

    @property
    def kind(self) -> str:
        """ "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or ""."""
        return self.named.kind or (self.matmul.kind if self.matmul is not None and self.is_product else "")

    @property
    def architecture(self) -> str:
        """Architecture that the kernel was built for, by its name; an older one than the GPU's runs too."""
        return self.named.architecture

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that the name spells."""
        return self.named.dtypes

    @property
    def is_product(self) -> bool:
        """Whether it computes a matrix product, or may do so."""
        return self.verdict in PRODUCTS

    @property
    def is_communication(self) -> bool:
        return self.named.kind == "communication"

    @property
    def tflops(self) -> float | None:
        """Achieved rate in TFLOP/s; None where the FLOPs are unknown or the time is 0."""
        return self.flops / self.time_us / 1e6 if self.flops is not None and self.time_us > 0 else None
