"""KernelReport: the results on Tensor Cores in traces, as plain data that every form of the report renders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from mpinspect.kernels.analysis.limits import Limits
from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.ranks import RankReport
from mpinspect.kernels.analysis.rows import KernelRow
from mpinspect.kernels.analysis.shares import Coverage, ModuleRow, NameRow, Shares
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.rendering import RendersItself

if TYPE_CHECKING:
    from mpinspect.runtime.gpus import Gpu

#: Ids of all findings.
KERNEL_FINDING_IDS = (
    "trace-cut-short",
    "no-gpu-activity",
    "no-kernels",
    "no-tensor-cores",
    "not-nvidia",
    "unknown-gpu",
    "tensor-cores-unused",
    "eligible-not-used",
    "used-but-degraded",
    "rate-contradicts-name",
    "unknown-kernels",
    "layout-conversions",
    "communication",
    "gpu-idle",
    "low-attribution",
    "different-jobs",
    "ranks-differ",
    "trace-note",
)


@dataclass(frozen=True, repr=False)
class KernelReport(RendersItself):
    """The use of Tensor Cores. The report renders itself: ``str()``, ``_repr_html_()``, ``save(path)``, ``to_json()``.

    Args:
        kernels: a row for each run of a kernel, by trace and start time.
        gpus: the GPUs that kernels were judged for, in order of appearance (only one if the caller named it).
        shares: times and shares over all traces together, such as ``tensor_core_fraction``.
        coverage: share of kernel time whose operator and module are known.
        phrase: the count of Tensor Core kernels, as from ``grep 884``: "884 kernels: 12 of 12 GEMMs"; "" without products.
        by_name, by_module: kernel time by name and by module, most time first.
        losses: products eligible for Tensor Cores but not on them, and degraded products, most time first.
        limits: math-limited, memory-limited and idle time, and the resulting bound of the speedup.
        ranks: one part for each trace.
        findings: the findings, the most severe first.
        rules_version: version of the table of kernel names.
    """

    kind: ClassVar[str] = "kernels"

    kernels: tuple[KernelRow, ...]
    gpus: tuple[Gpu, ...]
    shares: Shares
    coverage: Coverage
    phrase: str
    by_name: tuple[NameRow, ...]
    by_module: tuple[ModuleRow, ...]
    losses: tuple[Loss, ...]
    limits: Limits
    ranks: tuple[RankReport, ...]
    findings: tuple[Finding, ...]
    rules_version: str = ""

    @property
    def tensor_core_fraction(self) -> float | None:
        """Return the share of the matrix products' time on Tensor Cores, native and degraded together; None without products."""
        return self.shares.tensor_core_fraction

    @property
    def tensor_core_fraction_of_all(self) -> float | None:
        """Return the share of all kernel time, communication included, on Tensor Cores; None without kernels."""
        return self.shares.tensor_core_fraction_of_all

    @property
    def tensor_core_fraction_of_compute(self) -> float | None:
        """Return the share of kernel time without communication on Tensor Cores; None without such kernels."""
        return self.shares.tensor_core_fraction_of_compute

    @property
    def verdict_time_us(self) -> dict[str, float]:
        """Return kernel time in us by verdict; every verdict is a key, and the values add up to all kernel time."""
        return self.shares.verdict_time_us

    @property
    def attributed_fraction(self) -> float | None:
        """Return the share of kernel time whose operator is known; None without kernels."""
        return self.coverage.attributed_fraction

    @cached_property
    def eligible(self) -> tuple[Loss, ...]:
        """Return the losses that were eligible for Tensor Cores but not on them."""
        return tuple(loss for loss in self.losses if loss.verdict == "off")

    @cached_property
    def degraded(self) -> tuple[Loss, ...]:
        """Return the losses that were on Tensor Cores, but degraded."""
        return tuple(loss for loss in self.losses if loss.verdict == "degraded")
