"""What every text report has in common: sections printed to a rich console, as plain text, or as HTML for notebooks."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpinspect.reporting.escaping import Report, escaped
from mpinspect.reporting.finding import SEVERITIES, Finding

#: A report's sections for a page so many columns wide. The report comes escaped.
Sections = Callable[[Report, int], Iterable[RenderableType]]

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;font-family:monospace">{code}</pre>'
#: Lines of a console. Nothing of ours depends on them, but without them rich takes a dumb terminal for 80 columns wide.
_HEIGHT = 24
#: A rule of hyphens under the header and nothing else.
_RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def plain_text(sections: Sections[Report], report: Report, width: int | None = None) -> str:
    """Text without colour, ``width`` columns wide (the terminal's by default, 100 where there is none)."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=width or _terminal_width(),
        height=_HEIGHT,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    to_console(sections, report, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")) + "\n"


def html(sections: Sections[Report], report: Report, width: int = 110) -> str:
    """The same in a ``<pre>`` with colours; everything in it is escaped."""
    console = Console(
        file=io.StringIO(),
        width=width,
        height=_HEIGHT,
        record=True,
        force_terminal=True,
        force_jupyter=False,
        legacy_windows=False,
    )
    to_console(sections, report, console)
    return console.export_html(inline_styles=True, code_format=_HTML)


def to_console(sections: Sections[Report], report: Report, console: Console) -> None:
    """Print to a rich console, in colour if that has any."""
    for section in sections(escaped(report), console.width):
        console.print(section, soft_wrap=False, highlight=False, markup=False, emoji=False)


def colour_console(stream: TextIO) -> Console | None:
    """A console that prints to the stream in colour; None where none is wanted.

    NO_COLOR (no-color.org) and FORCE_COLOR (force-color.org) count where they are set and not empty, the first before the
    second; without them a terminal has colour unless it is a dumb one, and nothing else has.
    """
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    forced = bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("NO_COLOR") or not (forced or (stream.isatty() and not is_dumb)):
        return None
    if stream.isatty() and not is_dumb:
        return Console(file=stream)
    return Console(file=stream, force_terminal=True, color_system="standard", width=_terminal_width(), height=_HEIGHT)


def titled(title: str, lines: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """A title in bold and what stands below it, indented."""
    yield Text(f"\n{title}", style="bold")
    for line in lines:
        yield Padding(line, (0, 0, 0, 2))


def findings(found: Iterable[Finding]) -> Iterator[Text]:
    """Findings, the severe ones first, each with its fix."""
    for finding in sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)):
        text = Text(f"{finding.severity}  ", style=STYLES[finding.severity])
        text.append(finding.id, style="bold")
        text.append(f"  {finding.message}", style="default")
        yield text
        if finding.fix:
            yield Text(f"  fix: {finding.fix}")


def ruled_table(*headings: str, left: int) -> Table:
    """A table with a rule of hyphens under its headings: the first ``left`` columns to the left, the others to the right."""
    table = _Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    return table


class _Table(Table):
    """A table in which a name in brackets is no markup, which rich looks for in cells that are plain strings."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def _terminal_width() -> int:
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))
