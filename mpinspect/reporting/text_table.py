"""Lays out tables for a terminal: selects the columns that fit, shortens or folds names, and folds cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from rich.cells import cell_len, chop_cells
from rich.text import Text

from mpinspect.reporting.document import Cell, Strip, Table
from mpinspect.reporting.words import filled, optional, shortened

STYLES = {
    "strong": "bold",
    "dim": "dim",
    "good": "green",
    "info": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "unknown": "magenta",
}

#: Spaces between a table's columns, and between the columns of a table whose names are on separate lines.
_GAP, _FOLDED_GAP = 2, 1
INDENT = "  "
#: Least width of a long name within a row: a dotted path of some five parts. Strips are made shorter before names.
_NAME_ROOM = 36
#: Bins per character of a strip, the finest first.
_STEPS = (2, 3)
#: Smallest share of each mark of a strip.
_MARKS = ((1e-1, "#"), (1e-2, "="), (1e-3, "-"), (math.ulp(0.0), "."), (0.0, " "))
STRIP_LEGEND = (
    "the picture: | marks the format's edges, < and > values outside of the picture, . under 0.1%, - under 1%, "
    "= under 10%, # 10% or more"
)


@dataclass(frozen=True)
class Detail:
    """How much tables show: columns up to ``priority``, and strips with ``step`` bins per character."""

    priority: int
    step: int


def most_that_fits(tables: Sequence[Table], width: int) -> Detail:
    """Return the most detail that lets all tables fit, with names in the rows or, failing that, on separate lines."""
    priorities = sorted({0, *(column.priority for table in tables for column in table.columns)}, reverse=True)
    details = [Detail(priority, step) for priority in priorities for step in _STEPS]
    for folded in (False, None):
        for detail in details:
            if all(Grid(table, detail, width).fits(folded=folded) for table in tables):
                return detail
    return details[-1]


class Grid:
    """A table laid out for a given width in characters."""

    def __init__(self, table: Table, detail: Detail, width: int) -> None:
        kept = [place for place, column in enumerate(table.columns) if column.priority <= detail.priority]
        self.columns = [table.columns[place] for place in kept]
        self.rows = [[row[place] for place in kept] for row in table.rows]
        self._width = width
        drawn = partial(_strip_words, step=detail.step)
        self._words = [[optional(cell.strip, drawn, cell.text) for cell in row] for row in self.rows]
        self._names = [place for place, column in enumerate(self.columns) if column.is_name]
        self._figures = [place for place, column in enumerate(self.columns) if not column.is_name]
        self._natural = [self._widest(place) for place in range(len(kept))]

    def _widest(self, place: int) -> int:
        heading = max(map(cell_len, self.columns[place].heading.split() or [""]))
        notes = max((cell_len(note) + len(INDENT) for row in self.rows for note in row[place].notes), default=0)
        return max([heading, min(notes, _NAME_ROOM), *(cell_len(row[place]) for row in self._words)])

    def fits(self, *, folded: bool | None) -> bool:
        """Return whether the table fits if only names are folded.

        ``folded``: whether names are on separate lines; None for either way.
        """
        if folded is None:
            return self.fits(folded=False) or self.fits(folded=True)
        if folded:
            return bool(self._names) and self._needed(self._figures, _FOLDED_GAP) + len(INDENT) <= self._width
        needed = [
            min(width, _NAME_ROOM) if place in self._names else width for place, width in enumerate(self._natural)
        ]
        return sum(needed) + _GAP * (len(needed) - 1) <= self._width

    def _needed(self, places: Sequence[int], gap: int) -> int:
        """Return the width of the columns and of the gaps between them."""
        return sum(self._natural[place] for place in places) + gap * max(len(places) - 1, 0)

    def _headings(self) -> list[Cell]:
        return [Cell(column.heading, "strong") for column in self.columns]

    def lines(self) -> Iterator[Text]:
        """Yield the headings, a rule, and the rows."""
        if self.fits(folded=False) or not self._names:
            yield from self._in_rows()
        else:
            yield from self._folded()

    def _in_rows(self) -> Iterator[Text]:
        places = range(len(self.columns))
        widths = list(self._natural)
        spare = self._width - _GAP * (len(widths) - 1) - sum(widths)
        if spare < 0:
            # Names must be folded anyway, so fold them a little more and leave headings of several words on one line.
            spare -= sum(max(0, cell_len(column.heading) - widths[place]) for place, column in enumerate(self.columns))
        for name in sorted(self._names, key=lambda name: -widths[name]):
            # Shrink the longest names first, down to _NAME_ROOM.
            given = min(0, max(spare, min(widths[name], _NAME_ROOM) - widths[name]))
            widths[name] += given
            spare -= given
        spare = self._width - _GAP * (len(widths) - 1) - sum(widths)
        if spare < 0:
            _squeeze(widths, list(places), -spare)
        spare = self._widen_headings(widths, places, spare)
        for name in self._names:
            # Give the remaining width to notes.
            notes = [len(INDENT) + cell_len(note) for row in self.rows for note in row[name].notes]
            wanted = min(max(0, max(notes, default=0) - widths[name]), max(spare, 0))
            widths[name] += wanted
            spare -= wanted
        yield from self._row(self._headings(), places, widths, _GAP)
        yield Text("-" * (sum(widths) + _GAP * (len(widths) - 1)))
        for row, words in zip(self.rows, self._words, strict=True):
            yield from self._row(row, places, widths, _GAP, words)

    def _folded(self) -> Iterator[Text]:
        """Yield the table with names on separate lines, which leaves the whole width to the other columns."""
        places = self._figures
        widths = list(self._natural)
        room = self._width - len(INDENT)
        spare = room - self._needed(places, _FOLDED_GAP)
        if spare < 0:
            _squeeze(widths, places, -spare)
        gap = _FOLDED_GAP
        if spare >= len(places) - 1:
            gap, spare = _GAP, spare - len(places) + 1
        self._widen_headings(widths, places, spare)
        yield from self._row(self._headings(), places, widths, gap, indent=INDENT)
        yield Text(
            "-" * min(self._width, len(INDENT) + sum(widths[place] for place in places) + gap * (len(places) - 1))
        )
        for row, words in zip(self.rows, self._words, strict=True):
            for name in self._names:
                # A row without a name continues the one above.
                for line in _folded(words[name], self._width, self.columns[name].cut) if words[name] else ():
                    yield Text(line, style=STYLES.get(row[name].tone, ""))
                for note in row[name].notes:
                    yield from (Text(INDENT + line, style="italic") for line in _folded(note, room))
            yield from self._row(row, places, widths, gap, words, INDENT)

    def _widen_headings(self, widths: list[int], places: Sequence[int], spare: int) -> int:
        """Widen columns by up to ``spare`` in total to fit headings on one line; return the width left over."""
        for place in places:
            wanted = min(max(0, cell_len(self.columns[place].heading) - widths[place]), max(spare, 0))
            widths[place] += wanted
            spare -= wanted
        return spare

    def _row(
        self,
        cells: Sequence[Cell],
        places: Sequence[int],
        widths: Sequence[int],
        gap: int,
        words: Sequence[str] = (),
        indent: str = "",
    ) -> Iterator[Text]:
        """Yield the lines of one row, each cell folded to its column's width; ``words``: other texts of the cells."""
        words = words or [cell.text for cell in cells]
        columns: list[list[tuple[str, str]]] = []
        for place in places:
            tone = STYLES.get(cells[place].tone, "")
            folded = [(line, tone) for line in _folded(words[place], widths[place], self.columns[place].cut)]
            for note in cells[place].notes:
                folded += [(INDENT + line, "italic") for line in _folded(note, max(8, widths[place] - len(INDENT)))]
            columns.append(folded)
        for across in zip_longest(*columns, fillvalue=("", "")):
            line = Text(indent)
            for place, (text, tone) in zip(places, across, strict=True):
                padding = " " * max(0, widths[place] - cell_len(text))
                is_left = self.columns[place].is_left or self.columns[place].is_name
                before, after = ("", padding) if is_left else (padding, "")
                line.append(before)
                line.append(text, style=tone)
                line.append(after + " " * gap)
            line.rstrip()
            yield line


def _squeeze(widths: list[int], places: Sequence[int], over: int) -> None:
    """Reduce the widths in place by ``over`` in total, always taking one from the widest column."""
    for _ in range(over):
        widest = max(places, key=lambda place: widths[place])
        widths[widest] = max(1, widths[widest] - 1)


def _folded(words: str, width: int, cut: str = "") -> list[str]:
    """Fold words into lines of at most ``width``, at spaces if possible; with ``cut``, shorten them to one line."""
    if cell_len(words) <= width:
        return [words]
    if cut:
        return chop_cells(shortened(words, width, cut), width)[:1]
    lines, line = [], ""
    for word in words.split(" "):
        joined = filled("{} ", line) + word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *full, line = chop_cells(word, width) or [""]
        lines += full
    return [*lines, line]


def _strip_words(strip: Strip, step: int) -> str:
    """Return the strip in ASCII, ``step`` bins per character.

    Leading bins of the first part that do not fill a character are added to the share below the strip.
    """
    first, *others = strip.parts or ((),)
    spare = len(first) % step
    below = strip.below + sum(first[:spare])
    drawn = "|".join(_marks(part, step) for part in (first[spare:], *others))
    return f"{'<' if below else ' '}{drawn}|{'>' if strip.above else ' '}"


def _marks(bins: Sequence[float], step: int) -> str:
    shares = [sum(bins[start : start + step]) for start in range(0, len(bins), step)]
    return "".join(next(mark for least, mark in _MARKS if share >= least) for share in shares)
