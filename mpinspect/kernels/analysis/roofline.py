"""The roofline: no kernel is faster than its arithmetic at the unit's peak, nor than its memory traffic at full bandwidth.

time >= max(flops / peak, bytes / bandwidth) (Williams, Waterman, Patterson, "Roofline", CACM 2009). Peaks are those of data
sheets at boost clock (``mpinspect.runtime.gpus``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, KernelRow
from mpinspect.runtime.gpus import Gpu, rate_key
from mpinspect.shapes.records import ITEM_SIZES


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a product, in us, by its arithmetic and by its memory traffic."""

    math_us: float
    memory_us: float

    @property
    def time_us(self) -> float:
        return max(self.math_us, self.memory_us)

    @property
    def limited_by(self) -> str:
        return "math" if self.math_us > self.memory_us else "memory"


def bound(row: KernelRow, dtype: str = "") -> Bound | None:
    """The bound of a run's product on its GPU's Tensor Cores in ``dtype``; None where FLOPs or rates are unknown.

    ``dtype``: another than the row's: its memory traffic changes with the size of an element.
    """
    chosen = dtype or row.dtype
    return _bound(row, chosen, tensor_core_peak(row.gpu, chosen))


def bound_as_run(row: KernelRow) -> Bound | None:
    """The bound on the units that the run used: Tensor Cores or, where the verdict is "off", CUDA cores."""
    on = row.verdict in ON_TENSOR_CORES
    return _bound(row, row.dtype, tensor_core_peak(row.gpu, row.dtype) if on else cuda_core_peak(row.gpu, row.dtype))


def tensor_core_peak(gpu: Gpu, dtype: str) -> float | None:
    """TFLOP/s of Tensor Cores ("float32": TF32's); None where unknown, or where they do not multiply that dtype."""
    return gpu.tensor_core_tflops.get(rate_key(dtype))


def cuda_core_peak(gpu: Gpu, dtype: str) -> float | None:
    """TFLOP/s without Tensor Cores; BF16's is at most FP16's; None where unknown."""
    return gpu.cuda_core_tflops.get("float16" if dtype == "bfloat16" else dtype)


def _bound(row: KernelRow, dtype: str, peak: float | None) -> Bound | None:
    if row.matmul is None or row.flops is None or not peak or not row.gpu.bandwidth_gb_s or row.matmul.flops <= 0:
        return None
    # Runs that share a call share its traffic as they share its FLOPs.
    traffic = row.matmul.bytes * row.flops / row.matmul.flops * _width(dtype) / _width(row.dtype)
    return Bound(math_us=row.flops / peak / 1e6, memory_us=traffic / row.gpu.bandwidth_gb_s / 1e3)


def _width(dtype: str) -> int:
    return ITEM_SIZES.get(dtype, 4)
