"""Renders documents as GitHub Markdown, to paste into an issue or a job's summary."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from mpinspect.reporting.document import (
    Block,
    Cell,
    Code,
    Document,
    Findings,
    Item,
    Items,
    Line,
    Parts,
    Section,
    Tables,
    item_words,
    legend_words,
    shown_items,
    shown_parts,
    shown_tables,
    static,
)
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.finding import Finding, gravest_first, inferred
from mpinspect.reporting.page import for_page

#: Characters that can be Markdown markup anywhere, and text that is markup only at the beginning of a line.
_MARKS = re.compile(r"([\\`*_\[\]|~#$@])")
_LEADING = re.compile(r"([-+=]|\d+(?=[.)]))")


def render(document: Document) -> str:
    """Return the document as GitHub-flavoured Markdown; names in it are escaped, tables' pipes included."""
    return "\n".join(_document(static(for_page(escaped(document))), 1)).strip("\n") + "\n"


def escape(text: str) -> str:
    """Return text escaped so that Markdown and HTML show it unchanged. Assumes printable text."""
    return _MARKS.sub(r"\\\1", html.escape(text, quote=False))


def _opening(text: str) -> str:
    """Return text escaped for the beginning of a line, where it must not begin a list, a rule or a code block."""
    shown = escape(text.lstrip())
    mark = _LEADING.match(shown)
    if mark is None:
        return shown
    if mark[0].isdigit():
        return f"{mark[0]}\\{shown[mark.end() :]}"
    return f"\\{shown}"


def _document(document: Document, level: int) -> Iterator[str]:
    if document.title:
        yield _heading(document.title, level)
    if document.alarm:
        yield from ("", f"**{escape(document.alarm)}**")
    for block in document.page:
        yield ""
        yield from _block(block, level)


def _heading(title: str, level: int) -> str:
    return f"{'#' * min(level, 6)} {escape(title)}"


def _block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Line):
        text = _opening(block.text)
        yield f"**{text}**" if block.tone in ("strong", "error", "warning", "good") else text
    elif isinstance(block, Code):
        yield from _fenced(block.text)
    elif isinstance(block, Section):
        yield _heading(block.title, level + 1)
        for inner in block.blocks:
            yield ""
            yield from _block(inner, level + 1)
    elif isinstance(block, Items):
        yield from _items(block)
    elif isinstance(block, Findings):
        for finding in gravest_first(block.findings):
            yield from _finding(finding)
    elif isinstance(block, Tables):
        yield from _tables(block, level)
    elif isinstance(block, Parts):
        yield from _parts(block, level)


def _rest(words: str) -> Iterator[str]:
    if words:
        yield from ("", escape(words))


def _items(block: Items) -> Iterator[str]:
    shown, rest = shown_items(block, page=True)
    for item in shown:
        yield from _item(item)
    yield from _rest(rest)


def _item(item: Item) -> Iterator[str]:
    words = _opening(item_words(item, page=True))
    if item.label:
        words = f"**{escape(item.label)}** {words}"
    elif item.details:
        words = f"**{words}**"
    yield f"- {words}"
    yield from (f"  - {_opening(detail)}" for detail in item.details)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"- **{escape(finding.severity)}** {escape(finding.id)}{escape(inferred(finding))}: {escape(finding.message)}"
    if finding.fix:
        yield f"  - fix: {escape(finding.fix)}"
    if finding.code:
        yield from ("", *(f"  {line}" for line in _fenced(finding.code)))


def _fenced(code: str) -> Iterator[str]:
    """Yield code unchanged, between fences longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    yield from (f"{fence}python", *code.splitlines(), fence)


def _tables(block: Tables, level: int) -> Iterator[str]:
    tables, rest = shown_tables(block, page=True)
    columns = []
    for number, table in enumerate(tables):
        if number:
            yield ""
        if table.title:
            yield from (_heading(table.title, level + 1), "")
        # Markdown can't draw strips, so their columns are left out.
        kept = [
            index for index in range(len(table.columns)) if not any(row[index].strip is not None for row in table.rows)
        ]
        headings = [table.columns[index] for index in kept]
        columns += headings
        yield _row(escape(column.heading) for column in headings)
        yield _row("---" if column.is_left or column.is_name else "---:" for column in headings)
        for row in table.rows:
            yield _row(_cell(row[index]) for index in kept)
    yield from _rest(rest)
    legend = legend_words(block, tables, columns)
    if legend:
        yield from ("", escape(legend))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return "<br>".join(map(escape, (cell.text, *cell.notes)))


def _parts(block: Parts, level: int) -> Iterator[str]:
    parts, rest = shown_parts(block, page=True)
    for number, part in enumerate(parts):
        if number:
            yield ""
        yield from (_heading(part.title, level + 1), "")
        yield from _document(part.document, level + 1 + bool(part.document.title))
    yield from _rest(rest)
