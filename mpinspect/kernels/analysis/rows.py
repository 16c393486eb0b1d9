"""One run of a kernel and what is known of it: the kernel itself, what its name tells, its product, its verdict."""

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
        named: what its name tells.
        gpu: the GPU that it was judged for.
        trace: index of its trace (``report.ranks``).
        verdict: one of VERDICTS; that of the name, unless the operator or the rate says otherwise.
        reason: a sentence.
        basis: what the verdict stands on: "name", "operator" (the call that launched it, where the name tells nothing or cannot
            be right), or "rate" (an estimate: FLOPs from shapes over measured time).
        dtype: what the product is computed from ("bfloat16"): of the operator's arguments, else of the name; "" unknown.
        matmul: the product of its operator; None where it is no product or the trace lacks shapes.
        flops: operations of this run; None unknown (several products in one call that no name tells apart).
        shape: today's shape rule on that product; None without it.
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
        """The operator that launched it, as "aten::addmm" (of a matrix product: the product's); "" where unknown."""
        op = (self.kernel.matmul_op if self.is_product else None) or self.kernel.op
        return op.name if op is not None else ""

    @property
    def module(self) -> str:
        """Dotted path of the module, or the chain of classes that a trace's Python stack gives; "" where unknown."""
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
        """The architecture that the kernel was written for, by its name; not always the GPU's; "" where unknown."""
        return self.named.architecture

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the name tells."""
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
        """Achieved TFLOP/s; None where the FLOPs are unknown or the time is 0."""
        return self.flops / self.time_us / 1e6 if self.flops is not None and self.time_us > 0 else None
