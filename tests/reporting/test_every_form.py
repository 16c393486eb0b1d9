"""Every kind of report, including empty and hostile ones, in every format."""

import dataclasses
import html.parser
import json
import re
from pathlib import Path

import made_kernels
import pytest
import sessions
import shape_records

from mpinspect.kernels.analysis import analyse_kernels
from mpinspect.numeric.blocks import QuantizationLoss
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.recipes import OPERANDS, RECIPES
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.agreement import GradientAgreement, LayerProbe
from mpinspect.ranges.analysis.precision_ranking import GradientErrors, PrecisionRanking, Widening
from mpinspect.ranges.analysis.recipe_comparison import RecipeReport, product_rows
from mpinspect.ranges.kinds import WEIGHT_GRADIENT
from mpinspect.ranges.probe import ProbeReport
from mpinspect.ranges.session import RunInfo, Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting import html as html_form
from mpinspect.reporting.document import Parts, Widget, static
from mpinspect.reporting.forms import KINDS, document, render
from mpinspect.reporting.text import print_to
from mpinspect.run.diff import DiffReport, ModelDiff, diff
from mpinspect.run.diff.products import Product, compare_kernels, compare_shapes
from mpinspect.run.diff.report import Side
from mpinspect.run.report import ModelPart, RunReport
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes

DOCS = Path(__file__).parents[2] / "docs"
#: The mappings of a JSON document whose keys are data.
OF_DATA = {
    *("versions", "evidence", "peaks", "gradient_peaks", "verdict_time_us", "verdict_calls"),
    *("tensor_core_tflops", "cuda_core_tflops", "unattributed_fractions", "saved_at_most_us"),
    *("kept_wide", "tokens", "functions"),
}

HOSTILE = "evil\n\x1b[31m\u202e</pre></style><script>alert(1)</script>|`*[red]_$#@ <img src=x onerror=alert(1)> &amp;"


def kernels(name):
    runs = [
        made_kernels.kernel(name, 5),
        made_kernels.kernel(f"{name}sgemm_", 5, made_kernels.mm(8, 8, 8, "float"), module=f"{name}/a"),
    ]
    return analyse_kernels(
        [made_kernels.trace(*runs, source=f"/tmp/{name}{rank}.json", notes=(name,)) for rank in (0, 1)]
    )


def shapes(name):
    products = shape_records.linear(64, 1023, 64, name=name)
    record = shape_records.recording(*products, sizes={1023: (name,)}, notes=(name,))
    return analyse_shapes(record, gpus.Gpu(name, "hopper", True), model=name)


def probe(*names):
    flushed = GradientAgreement(1.0, 100, 3, 9, 6, 1, 1, None, None)
    layers = tuple(
        LayerProbe(name, (10, 10), ExponentHistogram.from_counts([50, 50], -20), flushed, flushed, True, False)
        for name in names
    )
    advice = sessions.no_advice("Because.")
    return ProbeReport(layers, advice, 1024.0, True, "cpu", 2, Session(), names, names)


def recipes(*names):
    compared = (RECIPES["mxfp8"], RECIPES["nvfp4"])
    lost = QuantizationLoss(100, 30, 1, 5, 10.0, 2.0, 4.0, 3.5, 0.5)
    losses = {
        (name, recipe.name, product, tensor): lost
        for name in names
        for recipe in compared
        for product, tensors in OPERANDS.items()
        for tensor in tensors
    }
    rows = product_rows(losses, dict.fromkeys(names, (64, 10)), compared)
    return RecipeReport("".join(names[:1]), compared, rows, 2, names, names)


def ranking(*names):
    errors = GradientErrors(0.5, 1.5, "".join(names[:1]))
    better = GradientErrors(0.1, 0.3, "".join(names[-1:]))
    modules = tuple(Widening(name, operator, better, not operator) for name in names for operator in ("", name))
    return PrecisionRanking("".join(names[:1]), len(names), errors if names else None, modules, len(names))


def hostile_diff():
    """Return the diff of two runs with hostile names, whose layers, settings, findings and events differ."""
    names = (*sessions.HOSTILE_NAMES, HOSTILE)
    first, second = (
        sessions.session(
            {TensorKey(name, WEIGHT_GRADIENT): sessions.bell(centre - i) for i, name in enumerate(each)}, model=HOSTILE
        )
        for each, centre in ((names[1:], -12), (names[:-1], -20))
    )
    event = dataclasses.replace(sessions.culprit(), module=HOSTILE, tensor=HOSTILE)
    broken = dataclasses.replace(
        second, events=(event,), notes=(HOSTILE,), info=RunInfo(HOSTILE, versions={HOSTILE: HOSTILE})
    )
    report = diff(first, broken)
    product = Product(HOSTILE, HOSTILE, HOSTILE, 8, 8, 8, 1, HOSTILE, 1, HOSTILE)
    side = Side(HOSTILE, HOSTILE, (HOSTILE,))
    return dataclasses.replace(
        report,
        first=side,
        models=(*report.models, ModelDiff(HOSTILE, report.models[0].ranges)),
        only_first=(HOSTILE,),
        shapes=compare_shapes((), (product,)),
        kernels=compare_kernels(kernels(HOSTILE), kernels(f"{HOSTILE}b")),
    )


REPORTS = {
    "ranges everything": lambda: sessions.report_by_hand(sessions.everything()),
    "ranges empty": lambda: analyse(Session()),
    "ranges hostile": lambda: sessions.report_by_hand(sessions.all_sessions()["hostile"]),
    "probe empty": probe,
    "probe hostile": lambda: probe(HOSTILE, "decoder.weight"),
    "ranking empty": ranking,
    "ranking hostile": lambda: ranking(HOSTILE, "decoder"),
    "recipes empty": recipes,
    "recipes hostile": lambda: recipes(HOSTILE, "decoder"),
    "shapes small": shape_records.small,
    "shapes empty": lambda: analyse_shapes(shape_records.recording(backward=False), gpus.named("hopper")),
    "shapes hostile": lambda: shapes(HOSTILE),
    "kernels everything": made_kernels.everything,
    "kernels empty": lambda: analyse_kernels([]),
    "kernels without any in a trace": lambda: analyse_kernels([made_kernels.trace()]),
    "kernels hostile": lambda: kernels(HOSTILE),
    "diff empty": lambda: DiffReport(Side("", ""), Side("", ""), ()),
    "diff hostile": hostile_diff,
    "run of everything": lambda: dataclasses.replace(
        run(), parts=(ModelPart("Net", sessions.report_by_hand(sessions.everything())),)
    ),
    "run empty": lambda: RunReport("a.py", "ended"),
    "run hostile": lambda: RunReport(
        HOSTILE,
        HOSTILE,
        tuple(ModelPart(name, analyse(Session())) for name in (*sessions.HOSTILE_NAMES, HOSTILE)),
        shapes(HOSTILE),
        kernels(HOSTILE),
        (HOSTILE,),
        HOSTILE,
        broke_elsewhere=HOSTILE,
    ),
}


def run():
    """Return the report of a run of one model, with ranges, shapes and kernels of its modules."""
    gradients = {TensorKey(f"{name}.weight", WEIGHT_GRADIENT): sessions.bell(-20) for name in ("hidden", "head")}
    products = [*shape_records.linear(64, 1023, 4096, name="hidden"), *shape_records.linear(64, 4096, 512, name="head")]
    kernel_runs = [
        made_kernels.kernel(made_kernels.SGEMM, 30, module="hidden", module_is_path=True),
        made_kernels.kernel(made_kernels.NATIVE, 20, module="head", module_is_path=True),
    ]
    return RunReport(
        "train.py --lr 0.1",
        "ended",
        (ModelPart("Net", analyse(sessions.session(gradients))),),
        analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net"),
        analyse_kernels([made_kernels.trace(*kernel_runs)]),
        ("one optimizer was made before torch could be watched",),
        "runs/a",
    )


#: One report of each question. The golden files of ranges, and the lint's text and Markdown, belong to their own tests.
GOLDEN = {
    "shapes_small": (shape_records.small, (".html",)),
    "kernels_everything": (made_kernels.everything, (".txt", ".md", ".html")),
    "diff_hostile": (hostile_diff, (".txt", ".md", ".html")),
    "run_one_model": (run, (".txt", ".md", ".html")),
}


@pytest.mark.parametrize(
    ("name", "suffix"), [(name, suffix) for name, (_, forms) in GOLDEN.items() for suffix in forms]
)
def test_golden(name, suffix, golden):
    """HTML is compared without its style and its maps, whose scripts are tested in a browser."""
    report = GOLDEN[name][0]()
    size = {"width": 100} if suffix == ".txt" else {}
    page = html_form.render(static(document(report))) if suffix == ".html" else render(report, suffix, **size)
    golden(f"{name}{suffix}", re.sub("<style>.*?</style>", "<style></style>", page, flags=re.DOTALL))


def test_every_kind_is_here():
    assert {name.split()[0] for name in REPORTS} == set(KINDS)


@pytest.fixture(scope="module")
def reports():
    return {name: make() for name, make in REPORTS.items()}


def assert_plain(text):
    """Assert that the text is free of control characters and of lines that a name injected."""
    assert all(character.isprintable() or character == "\n" for character in text)
    assert not any(line.startswith(("\x1b", "</pre>")) for line in text.splitlines())
    assert " object at 0x" not in text


@pytest.mark.parametrize("name", REPORTS)
def test_text(name, reports):
    from rich.cells import cell_len

    for width in (40, 60, 90, 160):
        text = render(reports[name], ".txt", width=width)
        assert_plain(text)
        assert max(map(cell_len, text.splitlines())) <= width


@pytest.mark.parametrize("name", REPORTS)
def test_coloured_text_differs_only_by_its_colours(name, reports):
    import io

    from rich.console import Console

    file = io.StringIO()
    print_to(document(reports[name]), Console(file=file, force_terminal=True, color_system="standard", width=100))
    assert "\x1b[1m" in file.getvalue()
    bare = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    lines = [line.rstrip() for line in bare.strip("\n").split("\n")]
    assert lines == render(reports[name], ".txt", width=100).rstrip("\n").split("\n")


@pytest.mark.parametrize("name", REPORTS)
def test_markdown(name, reports):
    text = render(reports[name], ".md")
    assert_plain(text)
    assert text.startswith("# ")
    assert sum(line.startswith("# ") for line in text.splitlines()) == 1
    assert re.findall(r"<(?!br>)[^>]*>", text) == []
    columns = 0
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (columns and cells) or cells == columns, line
        columns = cells


def has_widget(blocks):
    """Return whether a block is a widget or contains one."""
    return any(
        isinstance(block, Widget)
        or (isinstance(block, Parts) and any(has_widget(part.document.blocks) for part in block.parts))
        for block in blocks
    )


class Page(html.parser.HTMLParser):
    """Checks that each tag of a page is closed by its own end tag."""

    EMPTY = ("meta", "input", "wbr")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words, self.links, self._open = set(), set(), [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.links += [value for name, value in attrs if name == "href"]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.words.append(data)


@pytest.mark.parametrize("name", REPORTS)
def test_html_is_well_formed_and_static_and_names_are_text_in_it(name, reports):
    text = render(reports[name], ".html")
    assert_plain(text)
    page, fragment = Page(text), Page(reports[name]._repr_html_())
    has_map = "data-widget" in page.attributes
    said = document(reports[name])
    assert has_map == (has_widget(said.blocks) or (said.front is not None and said.front.picture is not None))
    assert not {"img", "link"} & page.tags
    assert ("script" in page.tags) == has_map
    of_map = {"type", "data-widget", "data-names", "data-together", "data-first", "data-of"} if has_map else set()
    of_front = {"data-layer", "data-step", "data-thing", "href", "aria-label"} if said.front is not None else set()
    if said.front is not None and said.front.tabs:
        of_front |= {"role", "id", "value", "checked", "for", "type"}
    plain = {"lang", "charset", "name", "content", "http-equiv", "class", "title", "tabindex"}
    # The lengths of bars.
    assert set(re.findall(r'(style="[^"]*")', text)) <= set(re.findall(r'(style="width:[\d.]+%")', text))
    plain |= {"style"} if 'class="amount"' in text else set()
    assert page.attributes <= plain | of_map | of_front
    assert all(link.startswith("https://github.com/mpinspect/mpinspect/") for link in page.links)
    of_page = {"html", "head", "meta", "title", "body", "main", "script"}
    assert page.tags - fragment.tags <= of_page | {
        "div",
        "header",
        "details",
        "summary",
        "a",
        "pre",
        "ul",
        "li",
        "span",
        "section",
        "h2",
        "p",
        *(("input", "label") if said.front is not None and said.front.tabs else ()),
    }
    if said.front is None:
        assert fragment.tags == page.tags - of_page - ({"div"} - fragment.tags)
    assert document(reports[name]).title.split()[0].encode("unicode_escape").decode() in "".join(page.words)
    if "hostile" in name and "ranges" not in name:
        assert r"evil\n\x1b[31m\u202e</pre></style><script>alert(1)</script>" in "".join(fragment.words)


@pytest.mark.parametrize("name", REPORTS)
def test_json(name, reports):
    found = json.loads(render(reports[name], ".json"), parse_constant=pytest.fail)
    assert found["schema"].startswith("mpinspect.")
    assert render(reports[name], ".json").isascii()
    assert reports[name].to_json() == render(reports[name], ".json")


def keys(plain):
    """Yield the keys at any depth, except those of mappings whose keys are data."""
    if isinstance(plain, list):
        for item in plain:
            yield from keys(item)
    elif isinstance(plain, dict):
        for key, item in plain.items():
            yield key
            yield from keys(list(item.values()) if key == "lost_updates" and item else None if key in OF_DATA else item)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        *((name, "report-schema.md") for name in ("ranges everything", "recipes hostile", "ranking hostile")),
        ("kernels everything", "tensor-cores.md"),
    ],
)
def test_a_page_names_every_key(name, page, reports):
    documented = re.findall(r"`([\w.]+)`", (DOCS / page).read_text("utf-8"))
    assert set(keys(json.loads(render(reports[name], ".json")))) <= set(documented)


@pytest.mark.parametrize("name", REPORTS)
def test_the_suffix_chooses_the_form_of_a_saved_report(name, reports, tmp_path):
    for suffix in (".txt", ".md", ".html", ".json", ".JSON"):
        path = reports[name].save(tmp_path / "deep" / "er" / f"report{suffix}")
        assert path.read_text("utf-8") == render(reports[name], suffix.lower())


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_suffix_is_refused_before_anything_is_written(kind, reports, tmp_path):
    forms, refused = (
        ".txt .md .html .json",
        {"a.pdf": "the suffix '.pdf'", "a.txt.gz": "the suffix '.gz'", "a": "no suffix"},
    )
    if kind in ("ranges", "kernels", "run"):
        forms += " .png"
    else:
        refused["a.png"] = "the suffix '.png'"
    for name, what in refused.items():
        sentence = f"{name!r} has {what}, which names no form of report; there are {forms}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            reports[f"{kind} empty"].save(tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", REPORTS)
def test_every_form_has_the_same_sections(name, reports):
    """A new section appears in every format."""
    from mpinspect.reporting.document import Section, without_front_sections
    from mpinspect.reporting.markdown import escape
    from mpinspect.reporting.page import said_once

    said = document(reports[name])
    titles = [block.title for block in said.page if isinstance(block, Section) and not block.is_detail]
    text, markdown = render(reports[name], ".txt", width=100), render(reports[name], ".md")
    page = render(reports[name], ".html")
    below = [
        block.title
        for block in (said.page if said.front is None else without_front_sections(said.below))
        if isinstance(block, Section)
    ]
    for title in titles:
        assert f"\n{title}\n" in text
    for title in [block.title for block in said_once(said).page if isinstance(block, Section)]:
        assert f"\n## {escape(title)}\n" in markdown
    for title in below:
        assert f"<h2>{title}</h2>" in page
    # The front stands for the other sections: it has every finding.
    for listed in said.front.findings if said.front is not None else ():
        assert f'<span class="id">{listed.finding.id}</span>' in page
