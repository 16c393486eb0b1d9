"""Hand-written documents: truncated blocks and the widths of tables in each format."""

import pytest

from mpinspect.reporting import html, markdown, text
from mpinspect.reporting.document import (
    Cell,
    Column,
    Document,
    Findings,
    Item,
    Items,
    Limit,
    Line,
    Part,
    Parts,
    Section,
    Strip,
    Table,
    Tables,
    Term,
    bullets,
    lines,
    section,
    table,
)
from mpinspect.reporting.finding import Finding

FIGURES = tuple(f"figure{number}" for number in range(9))


def wide(name: str, priorities: int = 0) -> Document:
    columns = (
        Column("layer", is_name=True),
        *(Column(heading, priority=number * priorities) for number, heading in enumerate(FIGURES)),
    )
    return Document("wide", (table(columns, [[name, *(str(number) * 5 for number in range(9))]]),))


@pytest.mark.parametrize("width", [20, 33, 40, 60, 80, 100, 140])
@pytest.mark.parametrize("name", ["a", "encoder.layers.11.attention.self.query.weight" * 3, "schicht.größe.层.🔥" * 9])
def test_tables_of_any_number_of_columns_fit_any_width(name, width):
    from rich.cells import cell_len

    for priorities in (0, 1):
        rendered = text.render(wide(name, priorities), width)
        assert max(map(cell_len, rendered.splitlines())) <= width


def test_a_narrow_terminal_leaves_out_the_least_important_columns_first():
    shown = [sum(heading in text.render(wide("a", 1), width) for heading in FIGURES) for width in (30, 50, 70, 200)]
    assert shown == sorted(shown)
    assert shown[0] < shown[-1] == len(FIGURES)
    assert FIGURES[0] in text.render(wide("a", 1), 30)


def test_pages_have_every_column():
    for page in (markdown.render(wide("a", 1)), html.render(wide("a", 1))):
        assert all(heading in page for heading in FIGURES)


def test_a_name_without_room_is_above_its_figures():
    rows = text.render(wide("a.long.name.of.a.layer.somewhere"), 90).splitlines()
    assert rows[3] == "a.long.name.of.a.layer.somewhere"
    assert rows[4].split() == [str(number) * 5 for number in range(9)]


@pytest.mark.parametrize(
    ("cut", "shown"),
    [("middle", "encoder.layers.0.atten...t.in.weight"), ("start", "...yers.0.attention.output.in.weight")],
)
def test_a_name_may_be_cut(cut, shown):
    name = "encoder.layers.0.attention.output.in.weight"
    columns = [Column("time"), Column("name", is_name=True, cut=cut)]
    rendered = text.render(Document("", (table(columns, [["1 us", name]]),)), 42)
    assert shown in rendered
    assert name in markdown.render(Document("cut", (table(columns, [["1 us", name]]),)))


def test_each_format_truncates_at_its_limit_with_a_note():
    limit = Limit(2, 3, "more in JSON", "more elsewhere")
    rows = [[f"row{number}"] for number in range(5)]
    said = Document("t", (table([Column("name")], rows[:3], limit=limit, total=5),))
    assert "row1" in text.render(said, 80)
    assert "row2" not in text.render(said, 80)
    assert "... and 3 more in JSON\n" in text.render(said, 80)
    assert "row2" in markdown.render(said)
    assert "... and 2 more elsewhere\n" in markdown.render(said)
    assert "... and 2 more elsewhere" in html.render(said)


def test_tables_of_one_block_share_its_limit_by_rank():
    columns = (Column("name"),)
    first = Table(columns, ((Cell("mild"),), (Cell("worst"),)), "first", (3, 0))
    second = Table(columns, ((Cell("bad"),), (Cell("middling"),)), "second", (1, 2))
    third = Table(columns, ((Cell("good"),),), "third", (4,))

    def order(limit):
        rendered = text.render(Document("t", (Tables((first, second, third), Limit(limit, 9)),)), 80)
        names = ("mild", "worst", "bad", "middling", "good", "first", "second", "third")
        return [line.strip() for line in rendered.splitlines() if line.strip() in names]

    # All rows are in their own order; a selection is in order of rank.
    assert order(5) == ["first", "mild", "worst", "second", "bad", "middling", "third", "good"]
    assert order(3) == ["first", "worst", "second", "bad", "middling"]


def test_an_empty_optional_column_is_dropped():
    columns = [Column("name"), Column("here", is_optional=True), Column("gone", is_optional=True)]
    said = Document("t", (table(columns, [["a", "1", "-"], ["b", "-", "-"]]),))
    for form in (text.render(said, 80), markdown.render(said), html.render(said)):
        assert "here" in form
        assert "gone" not in form


def test_lists_and_names_end_in_how_many_more_there_are():
    names = Item("never seen", names=("a", "b", "c"), limit=Limit(1, 2))
    said = Document("t", (Items((names,)), bullets(["one", "two", "three"], Limit(1, 2))))
    assert "never seen: a and 2 more\n- one\n... and 2 more\n" in text.render(said, 80)
    assert "- never seen: a, b and 1 more\n" in markdown.render(said)
    assert "... and 1 more" in html.render(said)


def test_a_legend_explains_the_columns_that_are_shown_and_no_others():
    columns = [
        Column("name", is_name=True),
        Column("offset", meaning="unused"),
        Column("far", priority=1, meaning="x" * 9),
    ]
    said = Document("t", (table(columns, [["a", "1", "2" * 30]], legend="? not known"),))
    assert "? not known; offset: unused\n" in text.render(said, 40)
    assert "? not known; offset: unused; far: xxxxxxxxx\n" in text.render(said, 80)
    assert "far: xxxxxxxxx" in markdown.render(said)


def test_a_strip_is_drawn_as_finely_as_there_is_room_for():
    strip = Strip(0.0, ((0.0,) * 13 + (0.004, 0.05), (0.7, 0.2, 0.04, 0.005, 0.0005, 0.0)), 0.0005)
    said = Document("t", (table([Column("n"), Column("range", priority=1)], [["a", Cell(strip=strip)]]),))
    assert text.render(said, 80).splitlines()[3].strip() == "a         =|#=.|>"
    assert "range" not in text.render(said, 12)
    page = html.render(said)
    assert '<i class="s3"></i></span><span><i class="s4"></i>' in page
    assert "range" not in markdown.render(said)


def test_the_verdict_is_first_and_the_summary_ends_a_terminals_report():
    brief, seen = Section("In brief", lines("brief words")), Section("Seen", lines("seen words"))
    said = Document("t", (Line("middle words"),), "alarm words", lines("verdict words"), (brief, seen))
    terminal, pages = text.render(said, 80), [markdown.render(said), html.render(said)]
    order = ("alarm words", "verdict words", "middle words", "seen words", "brief words")
    assert sorted(order, key=terminal.index) == list(order)
    for page in pages:
        order = ("alarm words", "verdict words", "brief words", "middle words", "seen words")
        assert sorted(order, key=page.index) == list(order)


def test_a_page_explains_a_term_where_it_first_occurs():
    terms = (Term("window", r"\bwindow", "what fits"), Term("flushed", r"\bflush", "to zero"))
    inner = Document("", section("Deep", Line("It is flushed in this window.")), terms=terms)
    said = Document("t", (Parts((Part("p", inner),)),), verdict=lines("The windows move."), terms=terms)
    page = markdown.render(said)
    assert page.count("window: what fits.") == page.count("flushed: to zero.") == 1
    order = ("The windows move.", "window: what fits.", "It is flushed in this window.", "flushed: to zero.")
    assert sorted(order, key=page.index) == list(order)
    # In a browser the word itself explains itself, and a list at the end explains all.
    shown = html.render(said)
    for word, meaning in (("window", "what fits"), ("flushed", "to zero")):
        assert shown.count(f'<dfn tabindex="0">{word}<span class="meaning"> ({meaning})</span></dfn>') == 1
        assert shown.count(f"<dt>{word}</dt><dd>{meaning}</dd>") == 1
    assert shown.index("<dfn") < shown.index('<section class="terms">')
    assert "what fits" not in text.render(said, 80)


def test_documents_in_documents_are_one_level_deeper():
    inner = Document("inner", section("Deep", Line("words")))
    parts = Parts((Part("first", inner), Part("second", inner)), Limit(1, 2, "more models"), (1, 0))
    said = Document("outer", (parts,))
    assert [line for line in markdown.render(said).splitlines() if line.startswith("#")] == [
        *("# outer", "## first", "### inner", "#### Deep", "## second", "### inner", "#### Deep")
    ]
    terminal = text.render(said, 80)
    assert "second ---" in terminal
    assert "first ---" not in terminal
    assert "... and 1 more models" in terminal


def test_findings_are_sorted_by_severity():
    found = [Finding(severity, severity, "", "m", {}) for severity in ("info", "error", "warning")]
    for form in (text.render, markdown.render, html.render):
        rendered = form(Document("t", section("Findings", Findings(tuple(found)))))
        assert rendered.rindex("error") < rendered.rindex("warning") < rendered.rindex("info")


@pytest.mark.parametrize(
    "opening", ["- a", "+ a", "1. a", "12) a", "===", "    code", "# a", "> a", "--- a", "* a", "`a", "<b>a"]
)
def test_no_sentence_opens_as_a_mark_of_markdown(opening):
    rendered = markdown.render(Document("t", (Line(opening), bullets([opening]))))
    first = rendered.splitlines()[2]
    assert first[0] == "\\" or first.startswith(("&", "1\\", "12\\", "code")), first
    assert rendered.splitlines()[4] == f"- {first}"


def test_an_empty_section_is_omitted():
    assert section("Findings", Findings(())) == ()
    assert section("Rows", table([Column("a")], [])) == ()
    assert section("Lines", Line("")) == ()


def test_a_legend_explains_dashes_only_if_there_are_any():
    def legend(*figures):
        return text.render(
            Document("", (table([Column("n"), Column("a"), Column("b")], [figures], legend="? not known"),)), 80
        )

    assert "? not known; - no value\n" in legend("x", "1%", "-")
    assert "no value" not in legend("x", "1%", "?")


def test_columns_of_one_meaning_share_its_words():
    columns = [Column("n"), Column("a", meaning="of all"), Column("b", meaning="of all")]
    assert "? not known; a, b: of all\n" in text.render(
        Document("", (table(columns, [["x", "1", "2"]], legend="? not known"),)), 80
    )
