"""Kernel time added up: by verdict, as shares with their denominators, and by how far it could be attributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpinspect.kernels.analysis.rows import ON_TENSOR_CORES, PRODUCTS, VERDICTS, KernelRow
from mpinspect.kernels.records import UNATTRIBUTED


@dataclass(frozen=True)
class Shares:
    """Sums of kernel times, and shares of them (None where the denominator is 0).

    Args:
        calls: number of kernels that ran.
        kernel_time_us: all of them, communication included.
        communication_time_us: those of NCCL and its like.
        verdict_time_us, verdict_calls: by verdict, every verdict present.
    """

    calls: int
    kernel_time_us: float
    communication_time_us: float
    verdict_time_us: dict[str, float]
    verdict_calls: dict[str, int]

    @property
    def product_time_us(self) -> float:
        """Kernels that compute matrix products or may do so: native, degraded, off and unknown."""
        return sum(self.verdict_time_us[verdict] for verdict in PRODUCTS)

    @property
    def tensor_core_time_us(self) -> float:
        return sum(self.verdict_time_us[verdict] for verdict in ON_TENSOR_CORES)

    @property
    def compute_time_us(self) -> float:
        """All kernel time but communication."""
        return max(0.0, self.kernel_time_us - self.communication_time_us)

    @property
    def tensor_core_fraction(self) -> float | None:
        return share(self.tensor_core_time_us, self.product_time_us)

    @property
    def tensor_core_fraction_of_all(self) -> float | None:
        return share(self.tensor_core_time_us, self.kernel_time_us)

    @property
    def tensor_core_fraction_of_compute(self) -> float | None:
        return share(self.tensor_core_time_us, self.compute_time_us)

    @property
    def communication_fraction(self) -> float | None:
        return share(self.communication_time_us, self.kernel_time_us)

    def of_products(self, verdict: str) -> float | None:
        """A verdict's share of the matrix products' time."""
        return share(self.verdict_time_us[verdict], self.product_time_us)


@dataclass(frozen=True)
class Coverage:
    """How far kernel time could be attributed, as shares of it; None without kernels.

    Args:
        attributed_fraction: has an operator.
        module_fraction: has a module, be it a path or a chain of classes.
        path_fraction: has a module's dotted path.
        flops_fraction: of the matrix products' time: FLOPs are known.
        unattributed_fractions: has no operator, by reason (those of ``mpinspect.kernels.records.UNATTRIBUTED``, each present).
    """

    attributed_fraction: float | None
    module_fraction: float | None
    path_fraction: float | None
    flops_fraction: float | None
    unattributed_fractions: dict[str, float]


def shares(rows: Iterable[KernelRow]) -> Shares:
    time, calls = dict.fromkeys(VERDICTS, 0.0), dict.fromkeys(VERDICTS, 0)
    communication = 0.0
    for row in rows:
        verdict, us = row.verdict, row.kernel.time_us
        time[verdict] += us
        calls[verdict] += 1
        if row.named.kind == "communication":
            communication += us
    return Shares(sum(calls.values()), sum(time.values()), communication, time, calls)


def coverage(rows: Iterable[KernelRow]) -> Coverage:
    total = attributed = module = path = products = flops = 0.0
    reasons = dict.fromkeys(UNATTRIBUTED, 0.0)
    for row in rows:
        kernel = row.kernel
        time = kernel.time_us
        total += time
        if kernel.module:
            module += time
            path += time if kernel.module_is_path else 0.0
        if kernel.op is not None:
            attributed += time
        else:
            reason = kernel.unattributed or "no op"
            reasons[reason] = reasons.get(reason, 0.0) + time
        if row.is_product:
            products += time
            flops += time if row.flops is not None else 0.0
    return Coverage(
        attributed_fraction=share(attributed, total),
        module_fraction=share(module, total),
        path_fraction=share(path, total),
        flops_fraction=share(flops, products),
        unattributed_fractions={reason: share(time, total) or 0.0 for reason, time in reasons.items()},
    )


def share(part: float, whole: float) -> float | None:
    """part / whole within 0..1 (sums of floats can end a hair beyond); None where there is no whole."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None
