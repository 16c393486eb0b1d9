"""Renders documents as plain text that is readable without colour and in narrow terminals."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from mpinspect.reporting.document import (
    Block,
    Code,
    Column,
    Document,
    Findings,
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
from mpinspect.reporting.text_table import INDENT, STRIP_LEGEND, STYLES, Grid, most_that_fits

#: Console height in lines. The output does not depend on it, but without it rich assumes 80 columns in dumb terminals.
_HEIGHT = 24


def render(document: Document, width: int | None = None) -> str:
    """Return the document as text without colour, ``width`` columns wide (default: the terminal's width, else 100)."""
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
    print_to(document, console)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n")) + "\n"


def print_to(document: Document, console: Console) -> None:
    """Print the document to a rich console, in colour if the console supports colour."""
    for renderable in _document(static(escaped(document)), console.width):
        console.print(renderable, soft_wrap=False, highlight=False, markup=False, emoji=False)


def colour_console(stream: TextIO) -> Console | None:
    """Return a console that prints to the stream in colour; None if no colour is wanted.

    A non-empty NO_COLOR (no-color.org) turns colour off, otherwise a non-empty FORCE_COLOR (force-color.org) turns it
    on. Without either, the stream has colour only if it is a terminal and not a dumb one.
    """
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    forced = bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("NO_COLOR") or not (forced or (stream.isatty() and not is_dumb)):
        return None
    if stream.isatty() and not is_dumb:
        return Console(file=stream)
    return Console(file=stream, force_terminal=True, color_system="standard", width=_terminal_width(), height=_HEIGHT)


def _terminal_width() -> int:
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))


# -- blocks -----------------------------------------------------------------------------------------------------------


def _document(document: Document, width: int) -> Iterator[RenderableType]:
    if document.alarm:
        yield Text(document.alarm, style=STYLES["error"])
    if document.title:
        yield Text(document.title, style="bold")
    for block in (*document.verdict, *document.blocks):
        yield from _block(block, width)
    if document.summary:
        yield _rule(document.title)
        for part in reversed(document.summary):
            yield from _block(part, width)


def _rule(title: str) -> RenderableType:
    return Padding(Rule(Text(title, style="bold"), characters="-", align="left", style="dim"), (1, 0, 0, 0))


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if isinstance(block, Line):
        yield Text(block.text, style=STYLES.get(block.tone, ""))
    elif isinstance(block, Code):
        yield from (Text(f"{INDENT}{line}", style="bold") for line in block.text.splitlines())
    elif isinstance(block, Section):
        yield from _section(block, width)
    elif isinstance(block, Items):
        yield from _items(block)
    elif isinstance(block, Findings):
        for finding in gravest_first(block.findings):
            yield from _finding(finding)
    elif isinstance(block, Tables):
        yield from _tables(block, width)
    elif isinstance(block, Parts):
        yield from _parts(block, width)


def _section(block: Section, width: int) -> Iterator[RenderableType]:
    if block.is_detail:
        return
    yield _heading(block.title)
    for inner in block.blocks:
        for renderable in _block(inner, width - len(INDENT)):
            yield Padding(renderable, (0, 0, 0, len(INDENT)))


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _rest(words: str) -> Iterator[Text]:
    if words:
        yield Text(words, style="dim")


def _items(block: Items) -> Iterator[RenderableType]:
    shown, rest = shown_items(block, page=False)
    for item in shown:
        text = Text("- " * block.marked)
        if item.label:
            text.append(f"{item.label}  ", style=f"bold {STYLES.get(item.tone, '')}")
        text.append(item_words(item, page=False), style="bold" if item.details and not item.tone else "")
        yield text
        yield from (Padding(Text(detail), (0, 0, 0, len(INDENT))) for detail in item.details)
    yield from _rest(rest)


def _finding(finding: Finding) -> Iterator[RenderableType]:
    text = Text(f"{finding.severity}  ", style=STYLES[finding.severity])
    text.append(finding.id, style="bold")
    text.append(f"{inferred(finding)}  {finding.message}", style="default")
    yield text
    if finding.fix:
        yield Text(f"{INDENT}fix: {finding.fix}")
    for line in finding.code.splitlines():
        yield Text(f"{2 * INDENT}{line}", style="bold")


def _parts(block: Parts, width: int) -> Iterator[RenderableType]:
    parts, rest = shown_parts(block, page=False)
    for part in (part for part in parts if not part.is_detail):
        yield _rule(part.title)
        yield from _document(part.document, width)
    if rest:
        yield Text(f"\n{rest}")


def _tables(block: Tables, width: int) -> Iterator[RenderableType]:
    tables, rest = shown_tables(block, page=False)
    detail = most_that_fits(tables, width)
    columns: list[Column] = []
    for table in tables:
        if table.title:
            yield _heading(table.title)
        grid = Grid(table, detail, width)
        columns += grid.columns
        yield from grid.lines()
    is_apart = any(table.title for table in tables)
    if is_apart:
        yield Text("")
    yield from _rest(rest)
    legend = legend_words(block, tables, columns, STRIP_LEGEND)
    if legend:
        yield Text(legend, style="dim")
