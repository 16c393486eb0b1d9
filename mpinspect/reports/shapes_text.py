"""The lint's report as plain text: readable without colour, in ASCII but for names."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding as Indent
from rich.table import Table
from rich.text import Text

from mpinspect.analysis.finding import Finding
from mpinspect.analysis.shapes.report import ShapeReport
from mpinspect.reports.shapes_table import (
    LEGEND,
    PADDING_HEADINGS,
    ProductRow,
    clean_sentence,
    headline,
    padding_cells,
    product_rows,
    totals,
)
from mpinspect.reports.table import percent, printable

#: Rows of products shown, and notes.
MAX_PRODUCTS = 20
MAX_NOTES = 10
#: Below this many columns the modules stand on lines of their own.
_WIDE = 90

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;font-family:monospace">{code}</pre>'
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_VERDICT_STYLES = {"off": "red", "degraded": "yellow", "unknown": "dim", "native": "green"}
#: A rule of hyphens under the header and nothing else.
_RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(report: ShapeReport, width: int | None = None) -> str:
    """The report as text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    file = io.StringIO()
    columns = width or max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))
    console = Console(file=file, width=columns, color_system=None, force_jupyter=False, legacy_windows=False)
    render_console(report, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")) + "\n"


def render_html(report: ShapeReport, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours, for notebooks; everything in it is escaped."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, force_jupyter=False, legacy_windows=False
    )
    render_console(report, console)
    return console.export_html(inline_styles=True, code_format=_HTML)


def render_console(report: ShapeReport, console: Console) -> None:
    """Print the report to a rich console, in colour if that has any."""
    _print(_sections(report, console.width), console)


def render_padding(report: ShapeReport, width: int = 100) -> str:
    """The table of padded sizes alone; a sentence where there are none."""
    file = io.StringIO()
    _print(
        _padding(report), Console(file=file, width=width, color_system=None, force_jupyter=False, legacy_windows=False)
    )
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _print(sections: Iterable[RenderableType], console: Console) -> None:
    for section in sections:
        console.print(section, soft_wrap=False, highlight=False, markup=False, emoji=False)


def _sections(report: ShapeReport, width: int) -> Iterator[RenderableType]:
    yield Text(headline(report), style="bold")
    for line in totals(report):
        yield Text(line)
    clean = clean_sentence(report)
    if clean:
        yield Text(clean, style="bold green")
    if report.findings:
        yield from _titled("Findings", _findings(report.findings))
    if report.padding:
        yield from _titled("Sizes to pad", _padding(report))
    if report.matmuls:
        yield from _titled("Products, worst first", _products(product_rows(report), width))
    if report.notes:
        yield from _titled("Notes", _notes(report.notes))


def _titled(title: str, lines: Iterable[RenderableType]) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    for line in lines:
        yield Indent(line, (0, 0, 0, 2))


def _findings(findings: tuple[Finding, ...]) -> Iterator[Text]:
    for finding in findings:
        text = Text(f"{finding.severity}  ", style=_STYLES[finding.severity])
        text.append(finding.id, style="bold")
        text.append(f"  {printable(finding.message)}", style="default")
        yield text
        if finding.fix:
            yield Text(f"  fix: {printable(finding.fix)}")


def _padding(report: ShapeReport) -> Iterator[RenderableType]:
    if not report.padding:
        yield Text("No size needs padding.")
        return
    table = _table(*PADDING_HEADINGS, left=2)
    for padding in report.padding:
        table.add_row(*(Text(cell) for cell in padding_cells(padding)))
    yield table


def _products(rows: list[ProductRow], width: int) -> Iterator[RenderableType]:
    shown = rows[:MAX_PRODUCTS]
    headings = ("role", "M x N x K", "dtype", "calls", "share", "x8", "verdict")
    wide = width >= _WIDE
    table = _table(*(("module", *headings) if wide else headings), left=2)
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


def _table(*headings: str, left: int) -> Table:
    table = Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    return table


def _notes(notes: tuple[str, ...]) -> Iterator[Text]:
    for note in notes[:MAX_NOTES]:
        yield Text(f"- {printable(note)}")
    if len(notes) > MAX_NOTES:
        yield Text(f"... and {len(notes) - MAX_NOTES:,} more", style="dim")
