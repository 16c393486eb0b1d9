"""The lint's report as GitHub Markdown, to paste into an issue or a job's summary."""

from __future__ import annotations

from collections.abc import Iterator

from mpinspect.reporting.markdown_page import escape, page, section, table
from mpinspect.reporting.words import percent
from mpinspect.shapes.analysis.report import ShapeReport
from mpinspect.shapes.report.table import (
    LEGEND,
    PADDING_HEADINGS,
    clean_sentence,
    headline,
    padding_cells,
    product_rows,
    totals,
)

#: Rows of products; GitHub cuts a comment at 65,536 characters.
MAX_PRODUCTS = 60
MAX_NOTES = 30


def render(report: ShapeReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return page(_lines, report)


def _lines(report: ShapeReport) -> Iterator[str]:
    yield f"# {escape(headline(report))}"
    for line in (*totals(report), clean_sentence(report)):
        if line:
            yield from ("", f"{escape(line)}{'' if line.endswith('.') else '.'}")
    yield from section("Findings", _findings(report))
    yield from section("Sizes to pad", _padding(report))
    yield from section("Products", _products(report))
    yield from section("Notes", [f"- {escape(note)}" for note in report.notes[:MAX_NOTES]])


def _findings(report: ShapeReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"- **{finding.severity}** `{finding.id}`: {escape(finding.message)}"
        if finding.fix:
            yield f"  - fix: {escape(finding.fix)}"


def _padding(report: ShapeReport) -> Iterator[str]:
    if report.padding:
        yield from table(PADDING_HEADINGS, ([escape(cell) for cell in padding_cells(row)] for row in report.padding))


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
    yield from table(headings, ([escape(cell) for cell in row] for row in cells))
    if len(rows) > MAX_PRODUCTS:
        yield from ("", f"... and {len(rows) - MAX_PRODUCTS:,} more.")
    yield from ("", escape(LEGEND) + ".")
