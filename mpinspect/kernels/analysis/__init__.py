"""Analyse traces: the use of Tensor Cores, reasons against it, and its cost. Pure functions, without torch or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpinspect.kernels.analysis.findings import findings
from mpinspect.kernels.analysis.limits import limits
from mpinspect.kernels.analysis.losses import LintedModules, losses
from mpinspect.kernels.analysis.products import with_products
from mpinspect.kernels.analysis.ranks import differences, rank_reports
from mpinspect.kernels.analysis.rates import checked_by_rate
from mpinspect.kernels.analysis.report import KERNEL_FINDING_IDS, KernelReport
from mpinspect.kernels.analysis.shares import by_module, by_name, coverage, phrase, shares
from mpinspect.kernels.analysis.verdicts import gpus_of, judged_by_operator, rows_by_name
from mpinspect.kernels.names import RULES_VERSION
from mpinspect.kernels.records import KernelTrace
from mpinspect.runtime.garbage_collection import without_collection
from mpinspect.runtime.gpus import Gpu

if TYPE_CHECKING:
    from mpinspect.shapes.analysis import ShapeReport

__all__ = ["KERNEL_FINDING_IDS", "KernelReport", "analyse_kernels"]


def analyse_kernels(
    traces: Sequence[KernelTrace], gpu: Gpu | None = None, shapes: ShapeReport | None = None
) -> KernelReport:
    """Report the kernels on and off Tensor Cores in one trace, or in the traces of several ranks.

    Args:
        traces: one trace per rank. For an empty list, or traces without kernels, the report states that it is empty.
        gpu: the GPU to judge for, instead of the GPUs named in the traces.
        shapes: a shape lint of the same model; its causes are added to the causes of kernels of the same module.
    """
    with without_collection():
        return _analysed(traces, gpu, shapes)


def _analysed(traces: Sequence[KernelTrace], gpu: Gpu | None, linted: ShapeReport | None) -> KernelReport:
    rows = checked_by_rate(with_products(judged_by_operator(rows_by_name(traces, gpu))))
    ranks = rank_reports(traces, rows)
    report = KernelReport(
        kernels=tuple(rows),
        gpus=gpus_of(traces, gpu),
        shares=ranks[0].shares if len(ranks) == 1 else shares(rows),
        coverage=ranks[0].coverage if len(ranks) == 1 else coverage(rows),
        phrase=phrase(rows),
        by_name=by_name(rows),
        by_module=by_module(rows),
        losses=losses(rows, LintedModules(linted)),
        limits=limits(rows, ranks),
        ranks=ranks,
        findings=(),
        rules_version=RULES_VERSION,
    )
    return replace(report, findings=findings(report, differences(traces)))
