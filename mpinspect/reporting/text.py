"""Documents as plain text: readable without colour, in a narrow terminal as in a wide one."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from mpinspect.reporting.document import (
    Block,
    Cell,
    Column,
    Document,
    Findings,
    Items,
    Line,
    Parts,
    Section,
    Strip,
    Table,
    Tables,
    allowed_on,
    item_words,
    legend_words,
    rest_words,
    shown_items,
    shown_parts,
    shown_tables,
)
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.finding import Finding, gravest_first
from mpinspect.reporting.words import shortened

STYLES = {
    "strong": "bold",
    "dim": "dim",
    "good": "green",
    "info": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "unknown": "magenta",
}

#: Lines of a console. Nothing of ours depends on them, but without them rich takes a dumb terminal for 80 columns wide.
_HEIGHT = 24
#: Columns between those of a table, and between those of one whose names stand on lines of their own.
_GAP, _FOLDED_GAP = 2, 1
_INDENT = "  "
#: Columns that a long name needs at least to stand in a table's row.
_NAME_ROOM = 24
#: Bins a character of a strip, the finest first.
_STEPS = (2, 3)
#: Least share of each mark of a strip but the first.
_MARKS = ((1e-1, "#"), (1e-2, "="), (1e-3, "-"), (0.0, "."))
_STRIP_LEGEND = (
    "| marks its edges, < and > what lies beyond the picture; . under 0.1%, - under 1%, = under 10%, # 10% or more"
)


def render(document: Document, width: int | None = None) -> str:
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
    print_to(document, console)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n")) + "\n"


def print_to(document: Document, console: Console) -> None:
    """Print to a rich console, in colour if that has any."""
    for renderable in _document(escaped(document), console.width):
        console.print(renderable, soft_wrap=False, highlight=False, markup=False, emoji=False)


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


def _terminal_width() -> int:
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))


# -- blocks -----------------------------------------------------------------------------------------------------------


def _document(document: Document, width: int) -> Iterator[RenderableType]:
    if document.alarm:
        yield Text(document.alarm, style=STYLES["error"])
    if document.title:
        yield Text(document.title, style="bold")
    for block in document.blocks:
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
    elif isinstance(block, Section):
        yield _heading(block.title)
        for inner in block.blocks:
            for renderable in _block(inner, width - len(_INDENT)):
                yield Padding(renderable, (0, 0, 0, len(_INDENT)))
    elif isinstance(block, Items):
        yield from _items(block)
    elif isinstance(block, Findings):
        for finding in gravest_first(block.findings):
            yield from _finding(finding)
    elif isinstance(block, Tables):
        yield from _tables(block, width)
    else:
        yield from _parts(block, width)


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _rest(words: str) -> Iterator[Text]:
    if words:
        yield Text(words, style="dim")


def _items(block: Items) -> Iterator[RenderableType]:
    shown, rest = shown_items(block, page=False)
    for item in shown:
        text = Text("- " if block.marked else "")
        if item.label:
            text.append(f"{item.label}  ", style="bold")
        text.append(item_words(item, page=False), style="bold" if item.details else "")
        yield text
        yield from (Padding(Text(detail), (0, 0, 0, len(_INDENT))) for detail in item.details)
    yield from _rest(rest)


def _finding(finding: Finding) -> Iterator[RenderableType]:
    text = Text(f"{finding.severity}  ", style=STYLES[finding.severity])
    text.append(finding.id, style="bold")
    text.append(f"  {finding.message}", style="default")
    yield text
    if finding.fix:
        yield Text(f"{_INDENT}fix: {finding.fix}")


def _parts(block: Parts, width: int) -> Iterator[RenderableType]:
    parts, left = shown_parts(block, allowed_on(block.limit, page=False))
    for part in parts:
        yield _rule(part.title)
        yield from _document(part.document, width)
    if left:
        yield Text(f"\n{rest_words(block.limit, left, page=False)}")


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Detail:
    """How much tables show: columns up to a priority, and so many bins of a strip a character."""

    priority: int
    step: int


def _tables(block: Tables, width: int) -> Iterator[RenderableType]:
    tables, left = shown_tables(block, allowed_on(block.limit, page=False))
    detail = _most_that_fits(tables, width)
    columns: list[Column] = []
    has_strips = False
    for table in tables:
        if table.title:
            yield _heading(table.title)
        grid = _Grid(table, detail, width)
        columns += grid.columns
        has_strips |= any(cell.strip is not None for row in grid.rows for cell in row)
        yield from grid.lines()
    is_apart = any(table.title for table in tables)
    if is_apart:
        yield Text("")
    yield from _rest(rest_words(block.limit, left, page=False))
    legend = "; ".join(filter(None, (legend_words(block, columns), _STRIP_LEGEND if has_strips else "")))
    if legend:
        yield Text(legend, style="dim")


def _most_that_fits(tables: Sequence[Table], width: int) -> _Detail:
    """The most detail with which all tables fit, with names in their rows or, failing that, on lines of their own."""
    priorities = sorted({0, *(column.priority for table in tables for column in table.columns)}, reverse=True)
    details = [_Detail(priority, step) for priority in priorities for step in _STEPS]
    for folded in (False, True):
        for detail in details:
            if all(_Grid(table, detail, width).fits(folded=None if folded else False) for table in tables):
                return detail
    return details[-1]


class _Grid:
    """One table laid out for a width."""

    def __init__(self, table: Table, detail: _Detail, width: int) -> None:
        kept = [place for place, column in enumerate(table.columns) if column.priority <= detail.priority]
        self.columns = [table.columns[place] for place in kept]
        self.rows = [[row[place] for place in kept] for row in table.rows]
        self._width = width
        self._words = [[_cell_words(cell, detail.step) for cell in row] for row in self.rows]
        self._names = [place for place, column in enumerate(self.columns) if column.is_name]
        self._figures = [place for place, column in enumerate(self.columns) if not column.is_name]
        self._natural = [self._widest(place) for place in range(len(kept))]

    def _widest(self, place: int) -> int:
        heading = max(map(cell_len, self.columns[place].heading.split() or [""]))
        notes = max((cell_len(note) + len(_INDENT) for row in self.rows for note in row[place].notes), default=0)
        return max([heading, min(notes, _NAME_ROOM), *(cell_len(row[place]) for row in self._words)])

    def fits(self, *, folded: bool | None) -> bool:
        """Whether nothing but names must be folded. ``folded``: whether names stand on lines of their own; None: either way."""
        if folded is None:
            return self.fits(folded=False) or self.fits(folded=True)
        if folded:
            return bool(self._names) and sum(self._gaps(self._figures, _FOLDED_GAP)) + len(_INDENT) <= self._width
        needed = [
            min(width, _NAME_ROOM) if place in self._names else width for place, width in enumerate(self._natural)
        ]
        return sum(needed) + _GAP * (len(needed) - 1) <= self._width

    def _gaps(self, places: Sequence[int], gap: int) -> list[int]:
        """The widths of columns with the gap behind each but the last."""
        return [self._natural[place] + (gap if place != places[-1] else 0) for place in places]

    def lines(self) -> Iterator[Text]:
        """The headings, a rule, and the rows."""
        if self.fits(folded=False) or not self._names:
            yield from self._in_rows()
        else:
            yield from self._folded()

    def _in_rows(self) -> Iterator[Text]:
        places = range(len(self.columns))
        widths = list(self._natural)
        spare = self._width - _GAP * (len(widths) - 1) - sum(widths)
        if spare < 0:
            # Some name is folded in any case, and may as well leave headings of several words their line.
            spare -= sum(max(0, cell_len(column.heading) - widths[place]) for place, column in enumerate(self.columns))
        for name in sorted(self._names, key=lambda name: -widths[name]):
            # The longest names give way first, as far as they can.
            given = min(0, max(spare, min(widths[name], _NAME_ROOM) - widths[name]))
            widths[name] += given
            spare -= given
        spare = self._width - _GAP * (len(widths) - 1) - sum(widths)
        if spare < 0:
            _squeeze(widths, list(places), -spare)
        self._widen_headings(widths, places, spare)
        yield from self._row([column.heading for column in self.columns], places, widths, _GAP, "bold")
        yield Text("-" * (sum(widths) + _GAP * (len(widths) - 1)))
        for row, words in zip(self.rows, self._words, strict=True):
            yield from self._row(words, places, widths, _GAP, cells=row)

    def _folded(self) -> Iterator[Text]:
        """The names on lines of their own, which leaves the figures the whole width."""
        places = self._figures
        widths = list(self._natural)
        room = self._width - len(_INDENT)
        spare = room - sum(self._gaps(places, _FOLDED_GAP))
        if spare < 0:
            _squeeze(widths, places, -spare)
        gap = _FOLDED_GAP
        if spare >= len(places) - 1:
            gap, spare = _GAP, spare - len(places) + 1
        self._widen_headings(widths, places, spare)
        yield from self._row([column.heading for column in self.columns], places, widths, gap, "bold", _INDENT)
        yield Text(
            "-" * min(self._width, len(_INDENT) + sum(widths[place] for place in places) + gap * (len(places) - 1))
        )
        for row, words in zip(self.rows, self._words, strict=True):
            for name in self._names:
                for line in _folded(words[name], self._width, self.columns[name].cut):
                    yield Text(line, style=STYLES.get(row[name].tone, ""))
                for note in row[name].notes:
                    yield from (Text(_INDENT + line, style="italic") for line in _folded(note, room))
            yield from self._row(words, places, widths, gap, indent=_INDENT, cells=row)

    def _widen_headings(self, widths: list[int], places: Sequence[int], spare: int) -> None:
        """Give columns whose heading has several words what is left, so that it stands in one line."""
        for place in places:
            wanted = min(max(0, cell_len(self.columns[place].heading) - widths[place]), max(spare, 0))
            widths[place] += wanted
            spare -= wanted

    def _row(
        self,
        words: Sequence[str],
        places: Sequence[int],
        widths: Sequence[int],
        gap: int,
        style: str = "",
        indent: str = "",
        cells: Sequence[Cell] | None = None,
    ) -> Iterator[Text]:
        """The lines of one row, each cell folded to its column's width."""
        columns: list[list[tuple[str, str]]] = []
        for place in places:
            tone = STYLES.get(cells[place].tone, "") if cells else style
            folded = [(line, tone) for line in _folded(words[place], widths[place], self.columns[place].cut)]
            for note in cells[place].notes if cells else ():
                folded += [(_INDENT + line, "italic") for line in _folded(note, max(8, widths[place] - len(_INDENT)))]
            columns.append(folded)
        for number in range(max(map(len, columns), default=0)):
            line = Text(indent)
            for place, folded in zip(places, columns, strict=True):
                text, tone = folded[number] if number < len(folded) else ("", "")
                padding = " " * max(0, widths[place] - cell_len(text))
                is_left = self.columns[place].is_left or self.columns[place].is_name
                line.append("" if is_left else padding)
                line.append(text, style=tone)
                line.append((padding if is_left else "") + " " * gap)
            line.rstrip()
            yield line


def _squeeze(widths: list[int], places: Sequence[int], over: int) -> None:
    """Take so many columns away from the widest, one by one."""
    for _ in range(over):
        widest = max(places, key=lambda place: widths[place])
        widths[widest] = max(1, widths[widest] - 1)


def _folded(words: str, width: int, cut: str = "") -> list[str]:
    """Words in lines of at most so many columns, broken at spaces where that is possible; or shortened to one line."""
    if cell_len(words) <= width:
        return [words]
    if cut:
        return chop_cells(shortened(words, width, cut), width)[:1]
    lines, line = [], ""
    for word in words.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *full, line = chop_cells(word, width) or [""]
        lines += full
    return [*lines, line]


def _cell_words(cell: Cell, step: int) -> str:
    return cell.text if cell.strip is None else _strip_words(cell.strip, step)


def _strip_words(strip: Strip, step: int) -> str:
    """The strip in ASCII, ``step`` bins a character; of the first part the bins that fill no character count as beyond it."""
    first, *others = strip.parts or ((),)
    spare = len(first) % step
    below = strip.below + sum(first[:spare])
    drawn = "|".join(_marks(part, step) for part in (first[spare:], *others))
    return f"{'<' if below else ' '}{drawn}|{'>' if strip.above else ' '}"


def _marks(bins: Sequence[float], step: int) -> str:
    shares = [sum(bins[start : start + step]) for start in range(0, len(bins), step)]
    return "".join(next(mark for least, mark in _MARKS if share >= least) if share else " " for share in shares)
