"""The joined report in words: what its text and its Markdown share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpinspect.ranges.report.scale_line import scale_line, steps_and_samples
from mpinspect.reporting.words import NOT_APPLICABLE, UNKNOWN, duration, percent, share
from mpinspect.run.report import ModuleRow, RunReport, by_module

#: Rows of the table of modules: those with most FLOPs; JSON has all.
MAX_MODULES = 25


@dataclass(frozen=True)
class ModuleTable:
    """The modules from all sides, those columns that there is something for. ``more``: rows left out."""

    names: tuple[str, ...]
    rows: list[list[str]]
    more: int


def brief(report: RunReport) -> Iterator[tuple[str, str]]:
    """What the run came to, a line a subject: (subject, words)."""
    yield "script", f"{report.command}: {report.outcome}"
    if report.first_line:
        # It heads the report, and has scrolled away by now.
        yield "broke", report.first_line
    for part in report.parts:
        counted = steps_and_samples(part.ranges.session.progress)
        yield part.name, f"{counted}. {scale_line(part.ranges.loss_scale)}"
    if report.shapes is not None:
        yield "shapes", _shapes(report)
    if report.kernels is not None:
        yield "kernels", _kernels(report)
    counts = {name: sum(f.severity == name for f in report.findings) for name in ("error", "warning", "info")}
    if any(counts.values()):
        yield "findings", ", ".join(f"{number} {name}" for name, number in counts.items() if number)


def module_table(report: RunReport) -> ModuleTable | None:
    """Modules from all sides at once; None where there is nothing to join."""
    rows = by_module(report)
    if not rows:
        return None
    names = ["module"]
    if report.shapes is not None:
        names += ["FLOPs", "shapes"]
    names += ["L1 lost at 1", "scale needed"]
    if any(row.kernel_time_us is not None for row in rows):
        names += ["kernels", "on Tensor Cores"]
    shown = rows[:MAX_MODULES]
    return ModuleTable(tuple(names), [_cells(row, names) for row in shown], len(rows) - len(shown))


def _cells(row: ModuleRow, names: list[str]) -> list[str]:
    name = row.module or "(outside of modules)"
    cells = {
        "module": f"{name} {row.module_type}".strip(),
        "FLOPs": NOT_APPLICABLE if row.flops_fraction is None else percent(row.flops_fraction),
        "shapes": row.shape_verdict or NOT_APPLICABLE,
        "L1 lost at 1": share(row.lost_l1_share, is_estimate=True) if row.lost_l1_share else UNKNOWN,
        "scale needed": UNKNOWN if row.log2_scale_needed is None else f"2^{row.log2_scale_needed}",
        "kernels": NOT_APPLICABLE if row.kernel_time_us is None else duration(row.kernel_time_us),
        "on Tensor Cores": NOT_APPLICABLE if row.tensor_core_fraction is None else percent(row.tensor_core_fraction),
    }
    return [cells[name] for name in names]


def _shapes(report: RunReport) -> str:
    shapes = report.shapes
    assert shapes is not None
    if not shapes.flops:
        return "no matrix product was recorded"
    native = shapes.flops_by_verdict.get("native", 0) / shapes.flops
    return f"{percent(native)} of one step's FLOPs suit the Tensor Cores of {shapes.gpu.name} (by strides and dtype)"


def _kernels(report: RunReport) -> str:
    kernels = report.kernels
    assert kernels is not None
    used = kernels.tensor_core_fraction
    if used is None:
        return "no matrix product ran on a GPU in the profiled step"
    words = f"{percent(used)} of the matrix products' time ran on Tensor Cores"
    return f"{words}; {kernels.phrase}" if kernels.phrase else words
