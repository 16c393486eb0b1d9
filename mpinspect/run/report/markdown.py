"""The joined report as GitHub Markdown: in brief first, then the reports of ranges, shapes and kernels, each a section."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpinspect.reporting.forms import form
from mpinspect.reporting.markdown_page import escape, page, section, table
from mpinspect.reporting.rendering import RendersItself
from mpinspect.run.report import RunReport
from mpinspect.run.report.words import brief, module_table

_HEADING = re.compile(r"^(#+ )", re.MULTILINE)


def render(report: RunReport) -> str:
    """The report as GitHub-flavoured Markdown; names are escaped, tables' pipes included."""
    return page(_lines, report)


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# mpinspect run {escape(report.command)}"
    if report.first_line:
        yield from ("", f"**{escape(report.first_line)}**")
    yield from section("In brief", [f"- {escape(subject)}: {escape(words)}" for subject, words in brief(report)])
    yield from section("Module by module", _modules(report))
    yield from section("What was seen, and what was not", [f"- {escape(words)}" for words in report.saw])
    for part in report.parts:
        yield from ("", _nested(part.ranges))
    for whole in (report.shapes, report.kernels):
        if whole is not None:
            yield from ("", _nested(whole))


def _modules(report: RunReport) -> Iterator[str]:
    modules = module_table(report)
    if modules is not None:
        yield from table(modules.names, ([*map(escape, row)] for row in modules.rows), left=1)
        if modules.more:
            yield from ("", f"... and {modules.more:,} more.")


def _nested(report: RendersItself) -> str:
    """A report's own Markdown, its headings one level lower."""
    text: str = form(report.kind, ".md").render(report)
    return _HEADING.sub(r"#\1", text).rstrip("\n")
