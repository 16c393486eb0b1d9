"""The kernel report as GitHub Markdown, to paste into an issue or a job's summary."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from mpinspect.analysis.tensor_cores.records import Loss
from mpinspect.analysis.tensor_cores.report import KernelReport
from mpinspect.analysis.tensor_cores.words import duration
from mpinspect.reports import kernels_rows as rows
from mpinspect.reports.table import printable

#: Rows of tables; GitHub cuts a comment at 65,536 characters.
MAX_ROWS = 50
#: Characters of a kernel's name.
_NAME = 100

#: What Markdown could take for a mark.
_MARKS = re.compile(r"([\\`*_\[\]|~#$@])")


def render(report: KernelReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return "\n".join(_lines(report)) + "\n"


def _escape(text: str) -> str:
    return _MARKS.sub(r"\\\1", html.escape(printable(text), quote=False))


def _lines(report: KernelReport) -> Iterator[str]:
    gpus = rows.gpus(report) if report.kernels else ""
    yield f"# Kernels of {_escape(rows.headline(report))}{f' on {_escape(gpus)}' if gpus else ''}"
    yield ""
    yield f"{report.shares.calls:,} kernels, {duration(report.shares.kernel_time_us)} of kernel time."
    if report.kernels:
        yield from _section("Tensor Cores", _tensor_cores(report))
        yield from _section("Eligible but not used", _losses(report.eligible))
        yield from _section("Used but degraded", _losses(report.degraded))
    yield from _section("Findings", _findings(report))
    if report.kernels:
        yield from _section("By kernel", _names(report))
        yield from _section("By module", _modules(report))
        yield from _section("What mixed precision can still bring", _bullets(rows.limit_words(report.limits)))
    if len(report.ranks) > 1:
        yield from _section("By trace", _table(rows.RANK_COLUMNS, map(rows.rank_cells, report.ranks), left=1))
    yield from _section("Coverage", _bullets(rows.coverage_words(report)))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A heading and its lines; nothing where there are none."""
    found = list(lines)
    if found:
        yield from ("", f"## {title}", "", *found)


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    return (f"- {_escape(sentence)}" for sentence in sentences)


def _table(columns: Sequence[str], cells: Iterable[Sequence[str]], *, left: int) -> Iterator[str]:
    """A table, its cells escaped; the columns from ``left`` on are set to the right."""
    yield f"| {' | '.join(map(_escape, columns))} |"
    yield f"| {' | '.join('---' if index < left else '---:' for index in range(len(columns)))} |"
    for row in cells:
        yield f"| {' | '.join(map(_escape, row))} |"


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"\n... and {count:,} more; the JSON report has all."


def _tensor_cores(report: KernelReport) -> Iterator[str]:
    for figure, of in rows.figures(report.shares):
        yield f"- **{_escape(figure)}** {_escape(of)}"
    if report.phrase:
        yield f"- {_escape(report.phrase)}"
    yield ""
    yield from _table(rows.VERDICT_COLUMNS, rows.verdict_cells(report.shares), left=2)


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
    yield from _table(columns, cells, left=2)
    yield from _more(len(losses) - MAX_ROWS)


def _findings(report: KernelReport) -> Iterator[str]:
    for finding in report.findings:
        fix = f" *{_escape(finding.fix)}*" if finding.fix else ""
        yield f"- **{finding.severity}** {_escape(finding.id)}: {_escape(finding.message)}{fix}"


def _names(report: KernelReport) -> Iterator[str]:
    cells = ([rows.short_name(row.name, _NAME), *rows.name_cells(row), row.reason] for row in report.by_name[:MAX_ROWS])
    yield from _table(["kernel", *rows.NAME_COLUMNS, "reason"], cells, left=2)
    yield from _more(len(report.by_name) - MAX_ROWS)


def _modules(report: KernelReport) -> Iterator[str]:
    if not rows.has_modules(report):
        return
    cells = ([rows.short_module(row.module, _NAME), *rows.module_cells(row)] for row in report.by_module[:MAX_ROWS])
    yield from _table(["module", *rows.MODULE_COLUMNS], cells, left=1)
    yield from _more(len(report.by_module) - MAX_ROWS)
