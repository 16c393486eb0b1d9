"""The lint's report as GitHub Markdown, to paste into an issue or a job's summary."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from mpinspect.analysis.shapes.report import ShapeReport
from mpinspect.reports.shapes_table import (
    LEGEND,
    PADDING_HEADINGS,
    clean_sentence,
    headline,
    padding_cells,
    product_rows,
    totals,
)
from mpinspect.reports.table import percent, printable

#: Rows of products; GitHub cuts a comment at 65,536 characters.
MAX_PRODUCTS = 60
MAX_NOTES = 30

#: What Markdown could take for a mark.
_MARKS = re.compile(r"([\\`*_\[\]|~#$@])")


def render(report: ShapeReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return "\n".join(_lines(report)) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return _MARKS.sub(r"\\\1", html.escape(printable(text), quote=False))


def _lines(report: ShapeReport) -> Iterator[str]:
    yield f"# {escape(headline(report))}"
    for line in (*totals(report), clean_sentence(report)):
        if line:
            yield from ("", f"{escape(line)}{'' if line.endswith('.') else '.'}")
    yield from _section("Findings", _findings(report))
    yield from _section("Sizes to pad", _padding(report))
    yield from _section("Products", _products(report))
    yield from _section("Notes", [f"- {escape(note)}" for note in report.notes[:MAX_NOTES]])


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A heading and its lines; nothing where there are none."""
    found = list(lines)
    if found:
        yield from ("", f"## {title}", "", *found)


def _findings(report: ShapeReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"- **{finding.severity}** `{finding.id}`: {escape(finding.message)}"
        if finding.fix:
            yield f"  - fix: {escape(finding.fix)}"


def _padding(report: ShapeReport) -> Iterator[str]:
    if report.padding:
        yield from _table(PADDING_HEADINGS, ([escape(cell) for cell in padding_cells(row)] for row in report.padding))


def _products(report: ShapeReport) -> Iterator[str]:
    rows = product_rows(report)
    if not rows:
        return
    headings = ("module", "role", "M x N x K", "dtype", "calls", "share", "x8", "verdict", "why")
    cells = (
        (
            row.module,
            row.role,
            row.sizes,
            row.dtype,
            f"{row.calls:,}",
            percent(min(row.share, 1.0)),
            row.talk,
            row.verdict,
            row.reason,
        )
        for row in rows[:MAX_PRODUCTS]
    )
    yield from _table(headings, ([escape(cell) for cell in row] for row in cells))
    if len(rows) > MAX_PRODUCTS:
        yield from ("", f"... and {len(rows) - MAX_PRODUCTS:,} more.")
    yield from ("", escape(LEGEND) + ".")


def _table(headings: Iterable[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """A table whose cells are escaped already."""
    columns = list(headings)
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"
