"""What a report says, before it has a form: blocks of plain data that text, Markdown and HTML render alike.

A question's ``report/document.py`` builds one ``Document``; the renderers (``text.py``, ``markdown.py``, ``html.py``) know no
question. A *terminal* is narrow and scrolls, a *page* (Markdown, HTML) is read from its top: a block may show fewer rows on the
first. Strings are the bare words, without marks of any form and without line ends; the renderers escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mpinspect.reporting.finding import Finding, Lines
from mpinspect.reporting.words import NOT_APPLICABLE

#: How a line or a cell is meant; "" is plain. A form without colour shows the words alone.
Tone = Literal["", "strong", "dim", "good", "warning", "error", "unknown"]


@dataclass(frozen=True)
class Limit:
    """How much of a long block is shown.

    Args:
        terminal: rows, items or names in a terminal.
        page: the same on a page.
        rest: stands behind "... and 12 ", where some are left out.
        rest_on_page: the same on a page, if other words are needed there.
    """

    terminal: int
    page: int
    rest: str = "more"
    rest_on_page: str = ""


@dataclass(frozen=True)
class Line:
    """A sentence, or several, as a paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Code:
    """Code to paste."""

    text: Lines


@dataclass(frozen=True)
class Item:
    """One entry of a list.

    Args:
        text: its words.
        label: stands before them and apart.
        details: lines below it.
        names: stand behind the text and a colon, separated by commas.
        limit: of the names.
    """

    text: str
    label: str = ""
    details: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    limit: Limit | None = None


@dataclass(frozen=True)
class Items:
    """A list.

    Args:
        items: at least as many as any form shows.
        limit: None where all are always shown.
        marked: whether a terminal puts a hyphen before each item, as pages always do.
        total: how many there are, where ``items`` holds fewer.
    """

    items: tuple[Item, ...]
    limit: Limit | None = None
    marked: bool = False
    total: int | None = None


@dataclass(frozen=True)
class Findings:
    """Findings; the gravest are shown first."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Strip:
    """A distribution as a strip: shares of a whole (0..1) in bins of one width, in parts with an edge between them.

    Args:
        below, above: the share left and right of all bins.
        parts: the bins of each part.
    """

    below: float
    parts: tuple[tuple[float, ...], ...]
    above: float


@dataclass(frozen=True)
class Cell:
    """One cell of a table. ``notes`` stand below its text; a strip stands in its place."""

    text: str = ""
    tone: Tone = ""
    notes: tuple[str, ...] = ()
    strip: Strip | None = None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        heading: a word or two.
        is_left: set to the left; else to the right, as figures are.
        priority: 0 where the column is always shown; where the page is too narrow the highest go first.
        is_name: whether its cells may be folded or, where ``cut`` says so, shortened; where that is not enough each has a line of
            its own.
        cut: "middle" or "start": what of a long name gives way to "..."; "" where it is folded instead.
        meaning: what the heading means, for the legend.
        is_optional: whether it is left out where no row shown has more than "-" in it.
    """

    heading: str
    is_left: bool = False
    priority: int = 0
    is_name: bool = False
    cut: str = ""
    meaning: str = ""
    is_optional: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below columns.

    Args:
        columns: at least one.
        rows: a cell for each column.
        title: where several tables make one block.
        ranks: of each row its place among the rows of the whole block, the one to show first 0; () where that is their order.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tables:
    """Tables that share their limit: a form shows so many rows of all together, those of the lowest rank.

    Args:
        tables: in the order in which they stand. Rows keep their order where all are shown, else they stand by rank.
        limit: None where all rows are always shown.
        total: how many rows there are, where the tables hold only those that some form shows.
        legend: what the cells' marks mean.
    """

    tables: tuple[Table, ...]
    limit: Limit | None = None
    total: int | None = None
    legend: str = ""


@dataclass(frozen=True)
class Section:
    """A title and what stands below it. ``is_detail``: a terminal leaves it out."""

    title: str
    blocks: tuple[Block, ...]
    is_detail: bool = False


@dataclass(frozen=True)
class Part:
    """A whole document inside another. ``title``: what it is there; ``is_detail``: a terminal leaves it out."""

    title: str
    document: Document
    is_detail: bool = False


@dataclass(frozen=True)
class Parts:
    """Documents inside another one; ``ranks`` as those of a table's rows."""

    parts: tuple[Part, ...]
    limit: Limit | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Widget:
    """What a reader of a page can play with; a form that runs no scripts leaves it out. Stands in no section.

    Args:
        title: stands above it.
        package: holds its script, an ES module with ``start()``, and its style.
        name: of these two files, without suffix.
        data: makes what the script is given, as base64.
        without: stands in its place where scripts do not run.
    """

    title: str
    package: str
    name: str
    data: Callable[[], str]
    without: str


Block = Line | Code | Items | Findings | Tables | Section | Parts | Widget


@dataclass(frozen=True)
class Document:
    """All that a report says, in the order of a page.

    Args:
        title: one line; "" within a part whose title says all.
        blocks: what stands below it.
        alarm: what broke, in one line; stands at the very top.
        verdict: stands before all blocks.
        summary: sections, the most important first. A page has the first below the verdict and ends with the others; a terminal,
            whose last lines are what one sees, ends with all in reverse.
    """

    title: str
    blocks: tuple[Block, ...]
    alarm: str = ""
    verdict: tuple[Block, ...] = ()
    summary: tuple[Section, ...] = ()

    @property
    def page(self) -> tuple[Block, ...]:
        """All blocks, in the order of a page."""
        return (*self.verdict, *self.summary[:1], *self.blocks, *self.summary[1:])


def section(title: str, *blocks: Block | None, is_detail: bool = False) -> tuple[Section, ...]:
    """Return a section of those blocks that hold something, as the only member of a tuple; () where none does."""
    kept = tuple(block for block in blocks if block is not None and not is_empty(block))
    return (Section(title, kept, is_detail),) if kept else ()


def is_empty(block: Block) -> bool:
    """Return whether nothing would be shown of a block."""
    if isinstance(block, Items):
        return not block.items
    if isinstance(block, Findings):
        return not block.findings
    if isinstance(block, Tables):
        return not any(table.rows for table in block.tables)
    if isinstance(block, Section):
        return all(map(is_empty, block.blocks))
    if isinstance(block, Widget):
        return False
    return not block.parts if isinstance(block, Parts) else not block.text


def bullets(sentences: Iterable[str], limit: Limit | None = None) -> Items:
    """Return a list of sentences."""
    return Items(tuple(map(Item, sentences)), limit, marked=True)


def lines(sentences: Iterable[str]) -> tuple[Line, ...]:
    """Sentences, a paragraph each."""
    return tuple(map(Line, sentences))


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Cell]],
    *,
    limit: Limit | None = None,
    total: int | None = None,
    legend: str = "",
) -> Tables:
    """Return a single table; cells that are strings are plain."""
    return Tables((Table(tuple(columns), tuple(map(cells, rows))),), limit, total, legend)


def cells(words: Iterable[str | Cell]) -> tuple[Cell, ...]:
    """Return a row of cells; strings become plain ones."""
    return tuple(Cell(word) if isinstance(word, str) else word for word in words)


def most(limit: Limit | None, number: int) -> int:
    """Return how many of so many rows at most any form shows: no others need be worded."""
    return number if limit is None else min(number, max(limit.terminal, limit.page))


# -- for the renderers ----------------------------------------------------------------------------------------------


def static(document: Document) -> Document:
    """Return the document without its widgets, those of documents inside it too."""
    return replace(document, blocks=_static(document.blocks))


def _static(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    return tuple(
        replace(block, parts=tuple(replace(part, document=static(part.document)) for part in block.parts))
        if isinstance(block, Parts)
        else block
        for block in blocks
        if not isinstance(block, Widget)
    )


def shown_items(block: Items, *, page: bool) -> tuple[tuple[Item, ...], str]:
    """Return the items that are shown, and what is said of the others."""
    shown = block.items[: allowed_on(block.limit, page=page)]
    total = len(block.items) if block.total is None else block.total
    return shown, rest_words(block.limit, total - len(shown), page=page)


def shown_tables(block: Tables, allowed: int | None) -> tuple[list[Table], int]:
    """Return the tables of which something is shown, with the rows that are, and how many rows are left out.

    Args:
        allowed: rows of all tables together; None for all.
    """
    total = sum(len(table.rows) for table in block.tables) if block.total is None else block.total
    if allowed is None or total <= allowed:
        return [_of_use(table) for table in block.tables if table.rows], 0
    found = []
    for table in block.tables:
        ranked = sorted(zip(table.ranks or range(len(table.rows)), table.rows, strict=True), key=lambda pair: pair[0])
        rows = tuple(row for rank, row in ranked if rank < allowed)
        if rows:
            found.append(_of_use(Table(table.columns, rows, table.title)))
    return found, total - sum(len(table.rows) for table in found)


def _of_use(table: Table) -> Table:
    """Return the table without optional columns in which nothing stands."""
    kept = [
        place
        for place, column in enumerate(table.columns)
        if not column.is_optional or any(row[place].text not in ("", NOT_APPLICABLE) for row in table.rows)
    ]
    if len(kept) == len(table.columns):
        return table
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return Table(tuple(table.columns[place] for place in kept), rows, table.title)


def shown_parts(block: Parts, allowed: int | None) -> tuple[list[Part], int]:
    """Return the documents that are shown, in their order, and how many are left out."""
    ranks = block.ranks or range(len(block.parts))
    shown = [part for part, rank in zip(block.parts, ranks, strict=True) if allowed is None or rank < allowed]
    return shown, len(block.parts) - len(shown)


def allowed_on(limit: Limit | None, *, page: bool) -> int | None:
    """Return how much a terminal or a page shows; None for all."""
    return None if limit is None else limit.page if page else limit.terminal


def rest_words(limit: Limit | None, left_out: int, *, page: bool) -> str:
    """ "... and 12 more"; "" where nothing is left out."""
    if not left_out:
        return ""
    words = "more" if limit is None else (page and limit.rest_on_page) or limit.rest
    return f"... and {left_out:,} {words}"


def item_words(item: Item, *, page: bool) -> str:
    """Return the item's text, and its names."""
    if not item.names:
        return item.text
    allowed = allowed_on(item.limit, page=page)
    shown = item.names if allowed is None else item.names[:allowed]
    left = len(item.names) - len(shown)
    return f"{item.text}: {', '.join(shown)}{f' and {left:,} more' if left else ''}"


def legend_words(block: Tables, columns: Iterable[Column]) -> str:
    """Return the marks' meaning and that of the columns shown, in one line."""
    meanings = dict.fromkeys(f"{column.heading}: {column.meaning}" for column in columns if column.meaning)
    return "; ".join(filter(None, (block.legend, *meanings)))
