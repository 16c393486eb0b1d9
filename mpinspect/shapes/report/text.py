"""The lint's report as plain text: readable without colour, in ASCII but for names."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from mpinspect.reporting.page import findings, html, plain_text, ruled_table, titled, to_console
from mpinspect.reporting.words import percent
from mpinspect.shapes.analysis.report import ShapeReport
from mpinspect.shapes.report.table import (
    LEGEND,
    PADDING_HEADINGS,
    ProductRow,
    clean_sentence,
    headline,
    is_clean,
    padding_cells,
    product_rows,
    totals,
)

#: Rows of products shown, and notes.
MAX_PRODUCTS = 20
MAX_NOTES = 10
#: Below this many columns the modules stand on lines of their own.
_WIDE = 90

_VERDICT_STYLES = {"off": "red", "degraded": "yellow", "unknown": "dim", "native": "green"}


def render(report: ShapeReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    return plain_text(_sections, report, width)


def render_html(report: ShapeReport, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours, for notebooks; everything in it is escaped."""
    return html(_sections, report, width)


def render_console(report: ShapeReport, console: Console) -> None:
    """Print the report to a rich console, in colour if that has any."""
    to_console(_sections, report, console)


def render_padding(report: ShapeReport, width: int = 100) -> str:
    """The table of padded sizes alone; a sentence where there are none."""
    return plain_text(lambda report, width: _padding(report), report, width)


def _sections(report: ShapeReport, width: int) -> Iterator[RenderableType]:
    yield Text(headline(report), style="bold")
    for line in totals(report):
        yield Text(line)
    clean = clean_sentence(report)
    if clean:
        yield Text(clean, style="bold green" if is_clean(report) else "bold")
    if report.findings:
        yield from titled("Findings", findings(report.findings))
    if report.padding:
        yield from titled("Sizes to pad", _padding(report))
    if report.matmuls:
        yield from titled("Products, worst first", _products(product_rows(report), width))
    if report.notes:
        yield from titled("Notes", _notes(report.notes))


def _padding(report: ShapeReport) -> Iterator[RenderableType]:
    if not report.padding:
        yield Text("No size needs padding.")
        return
    table = ruled_table(*PADDING_HEADINGS, left=2)
    for padding in report.padding:
        table.add_row(*(Text(cell) for cell in padding_cells(padding)))
    yield table


def _products(rows: list[ProductRow], width: int) -> Iterator[RenderableType]:
    shown = rows[:MAX_PRODUCTS]
    headings = ("role", "M x N x K", "dtype", "calls", "share", "x8", "verdict")
    wide = width >= _WIDE
    table = ruled_table(*(("module", *headings) if wide else headings), left=2)
    for row in shown:
        cells = [
            Text(row.role),
            Text(row.sizes),
            Text(row.dtype),
            Text(f"{row.calls:,}"),
            Text(percent(min(row.share, 1.0))),
            Text(row.talk),
            Text(row.verdict, style=_VERDICT_STYLES[row.verdict]),
        ]
        if wide:
            table.add_row(Text(row.module), *cells)
        else:
            cells[0] = Text(f"{row.module}\n  {row.role}")
            table.add_row(*cells)
    yield table
    if len(rows) > len(shown):
        rest = sum(row.share for row in rows[len(shown) :])
        yield Text(
            f"... and {len(rows) - len(shown):,} more kinds of products ({percent(min(rest, 1.0))} of the FLOPs); all are in JSON"
        )
    yield Text(LEGEND, style="dim")


def _notes(notes: tuple[str, ...]) -> Iterator[Text]:
    for note in notes[:MAX_NOTES]:
        yield Text(f"- {note}")
    if len(notes) > MAX_NOTES:
        yield Text(f"... and {len(notes) - MAX_NOTES:,} more", style="dim")
