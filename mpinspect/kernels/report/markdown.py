"""The kernel report as GitHub Markdown, to paste into an issue or a job's summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.report import rows
from mpinspect.reporting.markdown_page import escape, page, section, table
from mpinspect.reporting.words import duration

#: Rows of tables; GitHub cuts a comment at 65,536 characters.
MAX_ROWS = 50
#: Characters of a kernel's name.
_NAME = 100


def render(report: KernelReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return page(_lines, report)


def _lines(report: KernelReport) -> Iterator[str]:
    gpus = rows.gpus(report) if report.kernels else ""
    yield f"# Kernels of {escape(rows.headline(report))}{f' on {escape(gpus)}' if gpus else ''}"
    yield ""
    yield f"{report.shares.calls:,} kernels, {duration(report.shares.kernel_time_us)} of kernel time."
    if report.kernels:
        yield from section("Tensor Cores", _tensor_cores(report))
        yield from section("Eligible but not used", _losses(report.eligible))
        yield from section("Used but degraded", _losses(report.degraded))
    yield from section("Findings", _findings(report))
    if report.kernels:
        yield from section("By kernel", _names(report))
        yield from section("By module", _modules(report))
        yield from section("What mixed precision can still bring", _bullets(rows.limit_words(report.limits)))
    if len(report.ranks) > 1:
        yield from section("By trace", _escaped_table(rows.RANK_COLUMNS, map(rows.rank_cells, report.ranks), left=1))
    yield from section("Coverage", _bullets(rows.coverage_words(report)))


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    return (f"- {escape(sentence)}" for sentence in sentences)


def _escaped_table(columns: Sequence[str], cells: Iterable[Sequence[str]], *, left: int) -> Iterator[str]:
    """A table of plain words."""
    return table([*map(escape, columns)], ([*map(escape, row)] for row in cells), left=left)


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"\n... and {count:,} more; the JSON report has all."


def _tensor_cores(report: KernelReport) -> Iterator[str]:
    for figure, of in rows.figures(report.shares):
        yield f"- **{escape(figure)}** {escape(of)}"
    if report.phrase:
        yield f"- {escape(report.phrase)}"
    yield ""
    yield from _escaped_table(rows.VERDICT_COLUMNS, rows.verdict_cells(report.shares), left=2)


def _losses(losses: tuple[Loss, ...]) -> Iterator[str]:
    if not losses:
        return
    columns = ["product", "module", "time", "of all", "calls", "TFLOP/s", "cause", "could save"]
    cells = (
        [
            rows.product(loss),
            rows.modules(loss, _NAME),
            duration(loss.time_us),
            rows.share(loss.fraction),
            f"{loss.calls:,}",
            rows.rate(loss.tflops),
            loss.cause,
            "; ".join(map(rows.saving, loss.savings)) or "?",
        ]
        for loss in losses[:MAX_ROWS]
    )
    yield from _escaped_table(columns, cells, left=2)
    yield from _more(len(losses) - MAX_ROWS)


def _findings(report: KernelReport) -> Iterator[str]:
    for finding in report.findings:
        fix = f" *{escape(finding.fix)}*" if finding.fix else ""
        yield f"- **{finding.severity}** {escape(finding.id)}: {escape(finding.message)}{fix}"


def _names(report: KernelReport) -> Iterator[str]:
    cells = ([rows.short_name(row.name, _NAME), *rows.name_cells(row), row.reason] for row in report.by_name[:MAX_ROWS])
    yield from _escaped_table(["kernel", *rows.NAME_COLUMNS, "reason"], cells, left=2)
    yield from _more(len(report.by_name) - MAX_ROWS)


def _modules(report: KernelReport) -> Iterator[str]:
    if not rows.has_modules(report):
        return
    cells = ([rows.short_module(row.module, _NAME), *rows.module_cells(row)] for row in report.by_module[:MAX_ROWS])
    yield from _escaped_table(["module", *rows.MODULE_COLUMNS], cells, left=1)
    yield from _more(len(report.by_module) - MAX_ROWS)
