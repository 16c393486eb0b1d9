"""What the Markdown reports have in common: escaping, sections, tables."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpinspect.reporting.escaping import Report, escaped

#: What Markdown could take for a mark.
_MARKS = re.compile(r"([\\`*_\[\]|~#$@])")


def page(lines: Callable[[Report], Iterable[str]], report: Report) -> str:
    """A whole report as Markdown; its lines are made of the report escaped, as ``escaping`` has it."""
    return "\n".join(lines(escaped(report))) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it is. Knows that it is printable."""
    return _MARKS.sub(r"\\\1", html.escape(text, quote=False))


def section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A heading and its lines; nothing where there are none."""
    found = list(lines)
    if found:
        yield from ("", f"## {title}", "", *found)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int | None = None) -> Iterator[str]:
    """A table whose cells are escaped already; the columns from ``left`` on, if given, are set to the right."""
    ruler = ["---" if left is None or index < left else "---:" for index in range(len(columns))]
    for cells in (columns, ruler, *rows):
        yield f"| {' | '.join(cells)} |"
