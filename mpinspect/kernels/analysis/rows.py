"""KernelRow: one run of a kernel with the facts from its name, its product and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpinspect.kernels.records import Kernel

if TYPE_CHECKING:
    from mpinspect.kernels.names import KernelVerdict
    from mpinspect.runtime.gpus import Gpu
    from mpinspect.shapes.analysis import ShapeVerdict
    from mpinspect.shapes.records import Matmul

#: Sizes (m, n, k, batch) and role of a product.
_Product = tuple[int, int, int, int, str]

#: All verdicts, best first; the first four are the verdicts of matrix products.
VERDICTS = ("native", "degraded", "off", "unknown", "helper", "other")
PRODUCTS = VERDICTS[:4]
ON_TENSOR_CORES = VERDICTS[:2]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One run of a kernel.

    Args:
        kernel: the kernel as recorded in the trace.
        named: the verdict by the kernel's name alone.
        gpu: the GPU that the kernel was judged for.
        trace: index of the kernel's trace (``report.ranks``).
        verdict: one of VERDICTS: the name's verdict, unless the operator or the rate gives another.
        reason: a sentence on the verdict.
        basis: the source of the verdict: "name", "operator" (the call that launched the kernel, if the name is inconclusive
            or wrong), or "rate" (an estimate: FLOPs from shapes over measured time).
        dtype: dtype of the product's operands ("bfloat16") by the operator's arguments, else by the name; "" if unknown.
        matmul: the operator's product; None if there is no product or the trace lacks shapes.
        flops: operations of this run; None if unknown (one call has several products that no name distinguishes).
        shape: the shape rule's verdict on ``matmul``; None without a product.
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
        """Return the operator that launched the kernel, for a matrix product its own ("aten::addmm"); "" if unknown."""
        op = self.kernel.op
        if self.is_product:
            op = self.kernel.matmul_op or op
        return op.name if op is not None else ""

    @property
    def held_back(self) -> str:
        """Return why the shape rule calls the product degraded; "" if it does not."""
        return self.shape.reason if self.shape is not None and self.shape.verdict == "degraded" else ""

    @property
    def product(self) -> _Product | tuple[None, ...]:
        """Return the product's sizes (m, n, k, batch) and role, by which products are equal; five None without one."""
        product = self.matmul
        if product is None:
            return (None,) * 5
        return product.m, product.n, product.k, product.batch, product.role

    @property
    def module(self) -> str:
        """Return the module's dotted path, or its chain of classes from the trace's Python stack; "" if unknown."""
        return self.kernel.module

    @property
    def phase(self) -> str:
        return self.kernel.phase

    @property
    def device(self) -> int:
        return self.kernel.device

    @property
    def kind(self) -> str:
        """Return "gemm", "convolution", "attention", "recurrent", "gemv", "communication" or ""."""
        if self.named.kind or self.matmul is None or not self.is_product:
            return self.named.kind
        return self.matmul.kind

    @property
    def architecture(self) -> str:
        """Return the architecture that the kernel was built for, by its name; it may be older than the GPU's."""
        return self.named.architecture

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes in the kernel's name."""
        return self.named.dtypes

    @property
    def is_product(self) -> bool:
        """Return whether the kernel computes a matrix product, or may do so."""
        return self.verdict in PRODUCTS

    @property
    def is_communication(self) -> bool:
        return self.named.kind == "communication"

    @property
    def tflops(self) -> float | None:
        """Return the achieved rate in TFLOP/s; None if the FLOPs are unknown or the time is 0."""
        return tflops(self.flops, self.time_us)


def tflops(flops: float | None, time_us: float) -> float | None:
    """Return a rate in TFLOP/s; None if the FLOPs are unknown or the time is 0."""
    return flops / time_us / 1e6 if flops is not None and time_us > 0 else None
