"""A report's contents, independent of the output form: blocks of plain data for the text, Markdown and HTML renderers.

Each kind of report builds a ``Document`` in its ``report/document.py``; the renderers (``text.py``, ``markdown.py``,
``html.py``) treat all kinds equally. A *terminal* is narrow and scrolls, a *page* (Markdown, HTML) is read from the top,
so a block may show fewer rows in a terminal. Strings are plain text without markup or line ends; renderers escape them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from mpinspect.reporting.finding import Finding, Lines
from mpinspect.reporting.words import NOT_APPLICABLE, and_more

#: How a line or a cell is emphasised; "" is plain, "lead" stresses the words before the first colon on a page. A form without
#: colour shows the text alone.
Tone = Literal["", "lead", "strong", "dim", "good", "warning", "error", "unknown", "legend"]


@dataclass(frozen=True)
class Limit:
    """How much of a long block is shown.

    Args:
        terminal: rows, items or names in a terminal.
        page: rows, items or names on a page.
        rest: follows "... and 12 " if some are left out.
        rest_on_page: used instead of ``rest`` on a page; "" for ``rest``.
    """

    terminal: int
    page: int
    rest: str = "more"
    rest_on_page: str = ""

    def unless(self, everything: bool) -> Limit:
        """Return the limit, or none if a reader asked for everything."""
        return ALL if everything else self


#: No limit.
ALL = Limit(sys.maxsize, sys.maxsize)


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
        text: the entry's text.
        label: shown before the text, set apart.
        details: lines below the text.
        names: shown after the text and a colon, separated by commas.
        limit: how many names are shown.
        tone: of the label.
    """

    text: str
    label: str = ""
    details: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    limit: Limit = ALL
    tone: Tone = ""


@dataclass(frozen=True)
class Items:
    """A list.

    Args:
        items: at least as many items as any form shows.
        limit: how many items are shown.
        marked: whether a terminal puts a hyphen before each item, and HTML a bullet; Markdown always has a hyphen.
        total: the number of items if ``items`` holds only some of them; else 0.
    """

    items: tuple[Item, ...]
    limit: Limit = ALL
    marked: bool = False
    total: int = 0


@dataclass(frozen=True)
class Findings:
    """Findings, shown with the most severe first."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Strip:
    """A histogram as a strip: shares of a whole (0..1) in bins of equal width, split into parts by edges.

    Args:
        below, above: the shares below and above all bins.
        parts: the bins of each part.
    """

    below: float
    parts: tuple[tuple[float, ...], ...]
    above: float


@dataclass(frozen=True)
class Cell:
    """One cell of a table. ``notes`` are shown below the text; ``strip`` replaces the text, ``bar`` (0..1) is drawn before it."""

    text: str = ""
    tone: Tone = ""
    notes: tuple[str, ...] = ()
    strip: Strip | None = None
    bar: float | None = None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        heading: a word or two.
        is_left: whether cells are aligned to the left; otherwise to the right, as figures are.
        priority: 0 if the column is always shown; if the width is too small, the highest priorities are dropped first.
        is_name: whether the cells are names, which may be folded or (see ``cut``) shortened; if the row is still too
            wide, each name gets its own line.
        cut: "middle" or "start": the part of a long name that "..." replaces; "" if the name is folded instead.
        meaning: of the heading, for the legend.
        is_optional: whether the column is left out if all its shown cells are empty or "-".
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
        columns: at least one column.
        rows: rows with one cell for each column.
        title: shown above the table if a block has several tables.
        ranks: each row's rank among all rows of the block, 0 for the most important; () if rows are in rank order.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tables:
    """Tables with a common limit on the total number of rows shown; the rows of the lowest ranks are shown.

    Args:
        tables: the tables in display order. If all rows are shown, their order stays; otherwise they are sorted by rank.
        limit: how many rows are shown.
        total: the number of rows if the tables hold only some of them; else 0.
        legend: the meanings of the cells' marks.
    """

    tables: tuple[Table, ...]
    limit: Limit = ALL
    total: int = 0
    legend: str = ""


@dataclass(frozen=True)
class Section:
    """A title and the blocks below it.

    Args:
        is_detail: whether a terminal leaves the section out.
        is_on_front: whether a page with a front leaves the section out, since the front has its content.
    """

    title: str
    blocks: tuple[Block, ...]
    is_detail: bool = False
    is_on_front: bool = False


@dataclass(frozen=True)
class Part:
    """A document inside another.

    Args:
        title: its title there.
        is_detail: whether a terminal leaves the part out.
        is_on_front: whether a page with a front leaves the part out, since a tab of the front shows it.
    """

    title: str
    document: Document
    is_detail: bool = False
    is_on_front: bool = False


@dataclass(frozen=True)
class Parts:
    """Documents inside another document; ``ranks`` orders them by importance, like a table's."""

    parts: tuple[Part, ...]
    limit: Limit = ALL
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Widget:
    """An interactive element of a page; forms that run no scripts leave it out. Never part of a section.

    Args:
        title: shown above the widget; "" for the picture of a page's front.
        package: the package with the widget's script, an ES module with ``start()``, and its style sheet.
        name: name of these two files, without suffix.
        data: for each thing that the widget shows, its name and a function that returns the script's input data, in base64.
        without: text shown instead if scripts do not run.
        together: whether the widget opens with all of several things, not with one.
        first: index of the thing with which it opens.
        of: a word for its things.
    """

    title: str
    package: str
    name: str
    data: tuple[tuple[str, Callable[[], str]], ...]
    without: str
    together: bool = False
    first: int = 0
    of: str = "Model"


Block = Line | Code | Items | Findings | Tables | Section | Parts | Widget
_B = TypeVar("_B", bound=Block)


class Listed(NamedTuple):
    """A finding on a page's front.

    Args:
        finding: the finding.
        thing: name of the thing in the picture that the finding is about; "" if the picture shows only one.
        link: address of the page that explains the finding; "" for none.
        others: names of further things that have the same finding.
        place: the tensor or module in words; "" for the finding's layer as it is.
    """

    finding: Finding
    thing: str = ""
    link: str = ""
    others: tuple[str, ...] = ()
    place: str = ""


class Tab(NamedTuple):
    """A document that a page's front shows in place of the picture when a reader chooses it.

    Args:
        title: a word.
        document: the contents.
        alarms: the findings that ask for a change, as "1 warning"; "" without any.
    """

    title: str
    document: Document
    alarms: str = ""


@dataclass(frozen=True)
class Front:
    """The first screen of a page in a browser: a bar, the picture, and on its right the verdict, the change and the findings.

    Args:
        name: a short title for the bar; the document's title is its long form.
        state: the verdict as a word or two, for the bar.
        tone: of the state.
        facts: short facts about the run, for the bar.
        verdict: blocks with the verdict and the change.
        findings: all findings, which lead to their rows in the picture.
        notes: sentences below the findings.
        picture: an interactive picture; None without one.
        without: a sentence in place of the picture, if there are no tabs either.
        tabs: documents that are shown in place of the picture, the first of them if there is none.
        headline: where the gravest finding began.
        alarm: what followed, below the headline, in place of the document's alarm; "" for that alarm.
    """

    name: str
    state: str
    tone: Tone
    facts: tuple[str, ...]
    verdict: tuple[Block, ...]
    findings: tuple[Listed, ...]
    notes: tuple[str, ...] = ()
    picture: Widget | None = None
    without: str = ""
    tabs: tuple[Tab, ...] = ()
    headline: str = ""
    alarm: str = ""


class Term(NamedTuple):
    """A word that a page explains below the first block that matches ``pattern`` (a regular expression)."""

    word: str
    pattern: str
    meaning: str


@dataclass(frozen=True)
class Document:
    """The whole contents of a report, in page order.

    Args:
        title: one line; "" within a part whose title is enough.
        blocks: the blocks below the title.
        alarm: what broke, in one line; shown at the top.
        verdict: blocks shown before all others.
        summary: sections, the most important first. A page shows the first below the verdict and ends with the others;
            a terminal, whose last lines stay visible, ends with all of them in reverse order.
        terms: words that a page explains where they first occur.
        front: the first screen of a page in a browser, which replaces the alarm, the verdict and the first section of the summary
            there; None for a page without one.
    """

    title: str
    blocks: tuple[Block, ...]
    alarm: str = ""
    verdict: tuple[Block, ...] = ()
    summary: tuple[Section, ...] = ()
    terms: tuple[Term, ...] = ()
    front: Front | None = None

    @property
    def below(self) -> tuple[Block, ...]:
        """The blocks below the front, in the order of a page."""
        return (*self.blocks, *self.summary[1:])

    @property
    def page(self) -> tuple[Block, ...]:
        """All blocks, in the order of a page."""
        return (*self.verdict, *self.summary[:1], *self.blocks, *self.summary[1:])


def section(
    title: str, *blocks: Block | None, is_detail: bool = False, is_on_front: bool = False
) -> tuple[Section, ...]:
    """Return a one-element tuple with a section of the non-empty blocks, or () if all blocks are empty."""
    return nonempty(Section(title, nonempty(*blocks), is_detail, is_on_front))


def nonempty(*blocks: _B | None) -> tuple[_B, ...]:
    """Return the blocks that are neither None nor empty."""
    return tuple(block for block in blocks if block is not None and not is_empty(block))


def is_empty(block: Block) -> bool:
    if isinstance(block, Items):
        return not block.items
    if isinstance(block, Findings):
        return not block.findings
    if isinstance(block, Tables):
        return not any(table.rows for table in block.tables)
    if isinstance(block, Section):
        return all(map(is_empty, block.blocks))
    if isinstance(block, Parts):
        return not block.parts
    return not isinstance(block, Widget) and not block.text


def bullets(sentences: Iterable[str], limit: Limit = ALL) -> Items:
    """Return the sentences as a list with hyphens."""
    return Items(tuple(map(Item, sentences)), limit, marked=True)


def lines(*sentences: str, tone: Tone = "") -> tuple[Line, ...]:
    """Return each sentence that is not empty as a paragraph of its own."""
    return tuple(Line(sentence, tone) for sentence in sentences if sentence)


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Cell]],
    *,
    limit: Limit = ALL,
    total: int = 0,
    legend: str = "",
) -> Tables:
    """Return a block of one table; strings become plain cells."""
    return Tables((Table(tuple(columns), tuple(map(cells, rows))),), limit, total, legend)


def cells(words: Iterable[str | Cell]) -> tuple[Cell, ...]:
    """Return a row of cells; strings become plain cells."""
    return tuple(Cell(word) if isinstance(word, str) else word for word in words)


def most(limit: Limit, number: int) -> int:
    """Return the most of ``number`` rows that any form shows; callers need to build no others."""
    return min(number, max(limit.terminal, limit.page))


# -- for the renderers ----------------------------------------------------------------------------------------------


def static(document: Document) -> Document:
    """Return the document without its front and without widgets, including those of documents inside it."""
    blocks = tuple(with_documents(block, static) for block in document.blocks if not isinstance(block, Widget))
    return replace(document, blocks=blocks, front=None)


def without_front_sections(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks without the sections and parts that a front shows, including those of documents inside them."""
    return tuple(
        _without_front_parts(block) for block in blocks if not (isinstance(block, Section) and block.is_on_front)
    )


def _without_front_parts(block: Block) -> Block:
    if not isinstance(block, Parts):
        return block
    kept = tuple(part for part in block.parts if not part.is_on_front)
    return with_documents(
        replace(block, parts=kept), lambda document: replace(document, blocks=without_front_sections(document.blocks))
    )


def with_documents(block: Block, change: Callable[[Document], Document]) -> Block:
    """Return parts, each with its document changed, and any other block as it is."""
    if not isinstance(block, Parts):
        return block
    return replace(block, parts=tuple(replace(part, document=change(part.document)) for part in block.parts))


def shown_items(block: Items, *, page: bool) -> tuple[tuple[Item, ...], str]:
    """Return the items to show, and words for the number of the others ("" if all are shown)."""
    shown = block.items[: allowed_on(block.limit, page=page)]
    return shown, rest_words(block.limit, max(block.total, len(block.items)) - len(shown), page=page)


def shown_tables(block: Tables, *, page: bool) -> tuple[list[Table], str]:
    """Return the tables with the rows to show, without empty tables, and words for the number of the other rows."""
    total, allowed = (
        max(block.total, sum(len(table.rows) for table in block.tables)),
        allowed_on(block.limit, page=page),
    )
    if total <= allowed:
        return [_of_use(table) for table in block.tables if table.rows], ""
    found = []
    for table in block.tables:
        ranked = sorted(zip(table.ranks or range(len(table.rows)), table.rows, strict=True), key=lambda pair: pair[0])
        rows = tuple(row for rank, row in ranked if rank < allowed)
        if rows:
            found.append(_of_use(Table(table.columns, rows, table.title)))
    return found, rest_words(block.limit, total - sum(len(table.rows) for table in found), page=page)


def _of_use(table: Table) -> Table:
    """Return the table without optional columns whose cells are all empty or "-"."""
    kept = [
        place
        for place, column in enumerate(table.columns)
        if not column.is_optional or any(row[place].text not in ("", NOT_APPLICABLE) for row in table.rows)
    ]
    if len(kept) == len(table.columns):
        return table
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return Table(tuple(table.columns[place] for place in kept), rows, table.title)


def shown_parts(block: Parts, *, page: bool) -> tuple[list[Part], str]:
    """Return the parts to show, in their order, and words for the number of the others."""
    ranks, allowed = block.ranks or range(len(block.parts)), allowed_on(block.limit, page=page)
    shown = [part for part, rank in zip(block.parts, ranks, strict=True) if rank < allowed]
    return shown, rest_words(block.limit, len(block.parts) - len(shown), page=page)


def allowed_on(limit: Limit, *, page: bool) -> int:
    """Return how many rows, items or names a page (else a terminal) shows."""
    return limit.page if page else limit.terminal


def rest_words(limit: Limit, left_out: int, *, page: bool) -> str:
    """Return words for the number of omitted entries: "... and 12 more"; "" if all are shown."""
    if not left_out:
        return ""
    return f"... and {left_out:,} {(page and limit.rest_on_page) or limit.rest}"


def item_words(item: Item, *, page: bool) -> str:
    """Return the item's text and as many of its names as the limit allows."""
    if not item.names:
        return item.text
    shown = item.names[: allowed_on(item.limit, page=page)]
    return f"{item.text}: {', '.join(shown)}{and_more(len(item.names) - len(shown))}"


def legend_words(block: Tables, tables: Iterable[Table], columns: Collection[Column], strips: str = "") -> str:
    """Return in one line the legend: the block's, "-" and ``strips`` if cells shown have them, the meanings of columns shown."""
    cells = [pair for table in tables for row in table.rows for pair in zip(table.columns, row, strict=True)]
    notes = [block.legend]
    if block.legend and any(cell.text == NOT_APPLICABLE for _, cell in cells):
        notes.append(f"{NOT_APPLICABLE} no value")
    meanings: dict[str, dict[str, None]] = {}
    for column in columns:
        if column.meaning:
            meanings.setdefault(column.meaning, {})[column.heading] = None
    notes += (f"{', '.join(headings)}: {meaning}" for meaning, headings in meanings.items())
    if any(cell.strip is not None and column in columns for column, cell in cells):
        notes.append(strips)
    return "; ".join(filter(None, notes))
