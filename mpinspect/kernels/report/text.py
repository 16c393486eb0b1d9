"""The kernel report as plain text: readable without colour, in ASCII but for names, in a narrow terminal as in a wide one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from mpinspect.kernels.analysis.losses import Loss
from mpinspect.kernels.analysis.report import KernelReport
from mpinspect.kernels.analysis.shares import NameRow
from mpinspect.kernels.report import rows
from mpinspect.reporting.page import findings, html, plain_text, ruled_table, titled, to_console
from mpinspect.reporting.words import duration

#: Rows of tables: about as many as one looks through; JSON has all.
MAX_NAMES, MAX_MODULES, MAX_LOSSES, MAX_RANKS = 15, 15, 8, 32

_VERDICT_STYLES = {"native": "green", "degraded": "yellow", "off": "red", "unknown": "magenta"}


def render(report: KernelReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    return plain_text(_sections, report, width)


def render_html(report: KernelReport, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours, for notebooks; everything in it is escaped."""
    return html(_sections, report, width)


def render_console(report: KernelReport, console: Console) -> None:
    """Print the report to a rich console, in colour if that has any."""
    to_console(_sections, report, console)


def _sections(report: KernelReport, width: int) -> Iterator[RenderableType]:
    yield from _headline(report)
    if report.kernels:
        yield from titled("Tensor Cores", _tensor_cores(report))
    # What to do stands before the figures behind it.
    if report.findings:
        yield from titled("Findings", findings(report.findings))
    if report.kernels:
        if report.eligible:
            yield from titled("Eligible but not used", _losses(report.eligible))
        if report.degraded:
            yield from titled("Used but degraded", _losses(report.degraded))
        yield from titled("By kernel", _names(report.by_name, width))
        if rows.has_modules(report):
            yield from titled("By module", _modules(report, width))
        yield from titled("What mixed precision can still bring", map(Text, rows.limit_words(report.limits)))
    if len(report.ranks) > 1:
        yield from titled("By trace", _ranks(report))
    yield from titled("Coverage", map(Text, rows.coverage_words(report)))


def _headline(report: KernelReport) -> Iterator[Text]:
    gpus = rows.gpus(report) if report.kernels else ""
    yield Text(f"Kernels of {rows.headline(report)}{f' on {gpus}' if gpus else ''}", style="bold")
    shares = report.shares
    if not shares.calls:
        yield Text("No kernel was recorded.")
        return
    idle = report.limits.idle_us / report.limits.span_us if report.limits.span_us > 0 else None
    yield Text(
        f"{shares.calls:,} {'kernel' if shares.calls == 1 else 'kernels'}, {duration(shares.kernel_time_us)} of kernel time; "
        f"the GPU idle {rows.share(idle)} of {duration(report.limits.span_us)}"
    )


def _tensor_cores(report: KernelReport) -> Iterator[RenderableType]:
    for figure, of in rows.figures(report.shares):
        yield Text(f"{figure:>5} {of}")
    if report.phrase:
        yield Text(report.phrase, style="bold")
    table = ruled_table(*rows.VERDICT_COLUMNS, left=2)
    for cells in rows.verdict_cells(report.shares):
        table.add_row(Text(cells[0], style=_VERDICT_STYLES.get(cells[0], "")), *cells[1:])
    yield table


def _losses(losses: tuple[Loss, ...]) -> Iterator[RenderableType]:
    for loss in losses[:MAX_LOSSES]:
        times = f"{duration(loss.time_us)}, {rows.share(loss.fraction)} of all, {loss.calls:,} x"
        yield Text(f"{rows.product(loss)}: {times}, {rows.rate(loss.tflops)} TFLOP/s", style="bold")
        where = rows.modules(loss, 100)
        details = [f"in {where}"] if where else []
        details += [rows.short_name(loss.kernel, 90), loss.cause, *map(rows.saving, loss.savings)]
        for detail in details:
            yield Padding(Text(detail), (0, 0, 0, 2))
    yield from _more(len(losses) - MAX_LOSSES)


def _names(names: tuple[NameRow, ...], width: int) -> Iterator[RenderableType]:
    table = ruled_table(*rows.NAME_COLUMNS, left=1)
    table.add_column("kernel", justify="left", overflow="fold")
    room = max(24, width - 52)
    for row in names[:MAX_NAMES]:
        cells = rows.name_cells(row)
        name = Text(rows.short_name(row.name, room))
        if row.verdict in ("degraded", "off", "unknown"):
            name.append(f"\n  {row.reason}", style="dim")
        table.add_row(Text(cells[0], style=_VERDICT_STYLES.get(cells[0], "")), *cells[1:], name)
    yield table
    yield from _more(len(names) - MAX_NAMES)


def _modules(report: KernelReport, width: int) -> Iterator[RenderableType]:
    # Columns of verdicts that no module has would only take the names' room.
    cells = [rows.module_cells(row) for row in report.by_module[:MAX_MODULES]]
    used = [index for index in range(len(rows.MODULE_COLUMNS)) if any(row[index] != "-" for row in cells)]
    table = ruled_table(*(rows.MODULE_COLUMNS[index] for index in used), left=0)
    table.add_column("module", justify="left", no_wrap=True, overflow="ellipsis")
    for row, texts in zip(report.by_module, cells, strict=False):
        name = rows.short_module(row.module, max(20, width - 4 - 11 * len(used)))
        table.add_row(*(texts[index] for index in used), name)
    yield table
    yield from _more(len(report.by_module) - MAX_MODULES)


def _ranks(report: KernelReport) -> Iterator[RenderableType]:
    table = ruled_table(*rows.RANK_COLUMNS, left=1)
    for rank in report.ranks[:MAX_RANKS]:
        table.add_row(*rows.rank_cells(rank))
    yield table
    yield from _more(len(report.ranks) - MAX_RANKS)


def _more(count: int) -> Iterator[Text]:
    if count > 0:
        yield Text(f"... and {count:,} more; the JSON report has all", style="dim")
