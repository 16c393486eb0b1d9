"""The first screen of a page: its text without scripts, and its rendering in a browser."""

import html as markup
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sessions
import shape_records
from agreeing_reports import analyse
from test_explorer import SESSIONS, eventful, in_node
from test_opening import GRADIENT, broken

from mpinspect.kernels.profile import read_trace
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import analyse as analysing
from mpinspect.ranges.analysis.comparison import compare_ranges
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.records import LeftOver
from mpinspect.ranges.report.comparison import headline
from mpinspect.ranges.report.place import began
from mpinspect.ranges.session import OptimizerRecord, Precision, ScaleChange, Session
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.reporting import html
from mpinspect.reporting.document import Code, Document, Line
from mpinspect.reporting.finding import SEVERITIES_EXPLAINED, Finding
from mpinspect.reporting.forms import document, render
from mpinspect.reporting.words import percent
from mpinspect.run.diff import DiffReport, diff
from mpinspect.run.diff.report import ModelDiff, Side
from mpinspect.run.report import ModelPart, RunReport, by_module
from mpinspect.run.report.module_notes import _cells, _to_do, module_notes
from mpinspect.runtime import gpus
from mpinspect.shapes.analysis import analyse_shapes

#: The browser's size where no other is asked for.
SCREEN = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


def part(page: str, tag: str, name: str) -> str:
    """The text of the first element of this class, without tags."""
    (found,) = re.findall(rf"<{tag} [^>]*class=\"{name}[^>]*>(.*?)</{tag}>", page, re.DOTALL)[:1]
    return markup.unescape(re.sub(r'<span class="meaning">.*?</span>|<[^>]*>', " ", found))


def test_a_finding_that_several_models_share_stands_once() -> None:
    parts = tuple(ModelPart(name, analyse(broken())) for name in ("Actor", "Critic"))
    panel = part(render(RunReport("train.py", "ended", parts, log_dir="runs/a"), ".html"), "section", "panel")
    (finding,) = (each for each in parts[0].ranges.findings if each.is_alarm)
    assert panel.count(finding.message) == 1
    assert "1 error" in panel
    assert f"{finding.id} Actor, Critic, " in " ".join(panel.split())
    assert "Change in Actor, Critic: " in " ".join(panel.split())


def test_a_headline_names_all_models_that_share_it() -> None:
    healthy = ModelPart("Third", analyse(sound()))
    parts = tuple(ModelPart(name, analyse(broken())) for name in ("Actor", "Critic"))
    report = RunReport("train.py", "ended", (*parts, healthy), log_dir="runs/a")
    assert report.first_line.startswith("Actor, Critic: step 5, forward, ")
    later = ModelPart("Critic", analyse(broken(6)))
    assert replace(report, parts=(parts[0], later, healthy)).first_line.startswith("Actor: step 5, forward, ")
    two = tuple(replace(part, name=name) for name in ("Actor", "Critic") for part in found_in("blocks.0.fc2").parts)
    other = replace(two[1], ranges=found_in("blocks.1.fc2").parts[0].ranges)
    for shown, headline_shown in (
        (two, "Actor, Critic: Clip before unscale: in 'blocks.0.fc2'"),
        ((two[0], other), "Actor: Clip before unscale: in 'blocks.0.fc2'"),
    ):
        panel = part(render(replace(report, parts=shown), ".html"), "section", "panel")
        assert headline_shown in " ".join(panel.split())


def test_the_map_has_the_scale_that_the_loop_itself_applies(show: Any) -> None:

    unknown = sound()
    unknown = replace(unknown, progress=replace(unknown.progress, scales=(ScaleChange(0, None),)))
    ranges = replace(analysing.analyse(unknown), findings=())
    scaled = Finding("scaler-missing-in-float16", "info", "", "It is.", {"least": 256.0, "most": 4096.0})
    for findings, expected, other in (
        ((), "the run's is not known", "own scale"),
        ((scaled,), "with the loop's own scale, 256 (2⁸) to 4096 (2¹²)", "not known"),
    ):
        shown = RunReport("a.py", "ended", (ModelPart("N", replace(ranges, findings=findings)),))
        page = show(shown)
        said = page.text_content(".explorer .said") + page.text_content(".explorer figure.steps figcaption")
        assert expected in said
        assert other not in said


def test_the_severities_are_explained_once_in_the_text() -> None:
    page = render(of_run(broken()), ".html")
    assert page.count(f"<dt>severity</dt><dd>{SEVERITIES_EXPLAINED}</dd>") == 1


def sound() -> Session:
    return replace(broken(nan_from=99), events=())


def words_of_panel(page: str) -> str:
    return " ".join(part(page, "section", "panel").split())


def each_tensor(session: Session, change: Callable[[TensorKey, TensorWindow], TensorWindow]) -> Session:
    """Return the session with its tensors changed."""
    windows = (
        replace(window, tensors={key: change(key, each) for key, each in window.tensors.items()})
        for window in session.windows
    )
    return replace(session, windows=tuple(windows))


def renamed(session: Session, of: Callable[[str], str]) -> Session:
    """Return the session with other names of its layers."""
    windows = (
        replace(each, tensors={key._replace(name=of(key.name)): counted for key, counted in each.tensors.items()})
        for each in session.windows
    )
    watched = tuple(replace(info, name=of(info.name), module=of(info.module)) for info in session.watched)
    events = tuple(replace(each, module=of(each.module), tensor=of(each.tensor)) for each in session.events)
    return replace(session, windows=tuple(windows), watched=watched, events=events)


def of_run(session: Any, command: str = "/home/a/train.py --lr 1") -> RunReport:
    return RunReport(command, "ended", (ModelPart("Net", analyse(session)),), log_dir="runs/a")


def test_the_bar_names_the_script_its_state_its_steps_and_its_versions():
    bar = part(render(of_run(broken()), ".html"), "header", "bar").split("  ")
    words = " ".join(bar)
    for expected in ("train.py --lr 1", "Error", "01 Jan 2026, 00:00", "10 steps", "mpinspect 0.1.0", "runs/a"):
        assert expected in words
    assert "/home/a" not in words
    long = broken()
    long = replace(
        long,
        info=replace(long.info, devices="cuda (H100)"),
        progress=replace(long.progress, elapsed_s=725.2, ended=True),
    )
    words = part(render(of_run(long), ".html"), "header", "bar")
    assert "12 min 5 s" in words
    assert "cuda (H100)" in words
    assert "Healthy" in part(render(of_run(sound()), ".html"), "header", "bar")


def test_the_verdict_and_its_change_are_printed_once_and_above_the_tables():
    report = of_run(broken())
    page = render(report, ".html")
    sentence = report.parts[0].ranges.verdict.sentences[0].partition(": ")[2]
    panel = part(page, "section", "panel")
    assert " ".join(sentence.split()) in " ".join(panel.split())
    words = " ".join(markup.unescape(re.sub(r'<span class="meaning">.*?</span>|<[^>]*>', "", page)).split())
    assert words.count(" ".join(sentence.split())) == 1
    assert page.index('class="panel"') < page.index("<table")
    for gone in ("In brief", "Said above", "more note"):
        assert gone not in words


def test_every_finding_leads_to_its_layer_step_and_page():
    page = render(of_run(broken()), ".html")
    findings = analyse(broken()).findings
    found = re.findall(r'<details class="finding (\w+)" data-layer="([^"]*)"(?: data-step="(\d+)")?>', page)
    assert found == [
        (each.severity, each.layer, "" if each.step is None else str(each.step))
        for each in sorted(findings, key=lambda each: -("info", "warning", "error").index(each.severity))
    ]
    for finding in findings:
        assert re.search(rf'href="https://github\.com/[^"]*/docs/\w+\.md#{finding.id}"', page)


def test_every_link_is_to_a_heading_of_a_page_of_the_docs():
    from mpinspect.ranges.faults.registry import FAULTS
    from mpinspect.ranges.report.front import listed

    docs = Path(__file__).parents[2] / "docs"
    made = analyse(broken())
    pages: dict[str, set[str]] = {}
    for id in FAULTS:
        (entry,) = listed(replace(made, findings=(replace(made.findings[0], id=id),)))
        name, _, anchor = entry.link.rpartition("/")[2].partition("#")
        headings = pages.setdefault(
            name, set(re.findall(r"^#+ (\S+)$", (docs / name).read_text("utf-8"), re.MULTILINE))
        )
        assert anchor == id
        assert anchor in headings, (name, anchor)


def test_a_page_without_any_tensor_has_a_sentence_in_place_of_the_map():
    page = render(analyse(SESSIONS["word_model"].__class__()), ".html")
    assert "No tensor was counted, so there is no map." in page
    assert "data-widget" not in page
    assert "No model was inspected" in render(RunReport("a.py", "ended"), ".html")


def test_powers_of_two_are_superscripts_but_not_in_code():
    report = analyse(sessions.everything())
    page = render(report, ".html")
    shown = re.sub(r"<(script|style|pre)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.search(r"2\^-?\d", shown)
    assert re.search("2[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]", shown)
    assert "<pre><span>x = 2^-3</span></pre>" in html.render(Document("t", (Code("x = 2^-3"), Line("2^-3 and 2^10.5"))))
    assert "<p>2⁻³ and 2¹⁰·⁵</p>" in html.render(Document("t", (Code("x = 2^-3"), Line("2^-3 and 2^10.5"))))


def with_speed(*parts: ModelPart) -> RunReport:
    """A run with a profiled step whose GPU was mostly idle, and shapes of which one is to be padded."""
    products = shape_records.linear(64, 1023, 4096, name="hidden")
    shapes = analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net")
    kernels = read_trace(Path(__file__).parents[1] / "data" / "traces" / "h100_bert_small.json.gz")
    return RunReport("train.py", "ended", parts, shapes=shapes, kernels=kernels)


def test_kernels_and_shapes_are_tabs_with_the_number_of_their_findings():
    page = render(with_speed(ModelPart("Net", analyse(broken()))), ".html")
    switch = re.findall(r'value="(\w+)"( checked)?>\s*<label for="tab-\w+">([^<]*)</label>', page)
    assert switch == [
        ("ranges", " checked", "Ranges"),
        ("kernels", "", "Kernels (2 warnings)"),
        ("shapes", "", "Shapes (1 warning)"),
    ]
    # Each is in its tab, and not again below.
    for words in ("GPU time", "By kernel", "Products, worst first"):
        assert page.count(words) == 1
        assert page.index(words) < page.index('class="below"')
    assert 'class="tabs"' not in render(of_run(broken()), ".html")


def test_the_kernels_tab_begins_with_bars_an_idle_gpu_first():
    page = render(with_speed(), ".html")
    assert page.index("GPU time") < page.index("By kernel") < page.index(">Findings</h")
    (rows,) = re.findall(r"GPU time</h\d>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    # A verdict that is explained is an element of its own.
    shown = re.findall(r">(idle|native|degraded|other|copies)<", rows)
    assert shown == ["idle", "native", "degraded", "other", "copies"]
    assert sum(map(float, re.findall(r"width:([\d.]+)%", rows))) == pytest.approx(100, abs=1)


def test_a_page_of_kernels_or_shapes_alone_has_a_first_screen(show: Any, axe: str) -> None:
    report = with_speed()
    for alone, name, fix in ((report.kernels, "kernels", "torch.compile("), (report.shapes, "shapes", "")):
        page = show(alone, awaited="")
        bars = page.locator(f".tab.{name}").bounding_box()
        assert bars["width"] * bars["height"] > 0.6 * SCREEN["width"] * SCREEN["height"]
        assert page.locator(f".tab.{name} .amount i").first.bounding_box()["y"] < 200
        assert page.text_content(".bar .state") == "Warning"
        assert page.locator(".panel .finding").count() == len(
            [each for each in alone.findings if each in listed_of(alone)]
        )
        assert fix in (page.text_content(".panel pre") if fix else "")
        page.evaluate(axe)
        assert page.evaluate("axe.run().then(found => found.violations.map(each => each.id))") == []


def listed_of(report: Any) -> Any:
    return getattr(report, "listed", report.findings)


def test_a_run_without_a_model_opens_with_its_kernels_and_the_costliest_finding():
    page = render(with_speed(), ".html")
    assert "Warning" in part(page, "header", "bar")
    assert "The GPU was idle 92%" in part(page, "section", "panel")
    assert 'value="kernels" checked' in page
    assert "No model was inspected" not in page
    assert "No loss of speed found" in render(RunReport("a.py", "ended", shapes=suited()), ".html")


def suited() -> Any:
    products = shape_records.linear(64, 1024, 4096, name="hidden")
    return analyse_shapes(shape_records.recording(*products), gpus.named("hopper"), model="Net")


def test_only_a_verdict_on_shapes_that_asks_for_a_change_has_a_colour():
    parts = (ModelPart("Net", analyse(broken(module="hidden", tensor="hidden"))),)
    asked, unasked = with_speed(*parts), replace(with_speed(*parts), is_shape_detail=True)
    for report, tone in ((asked, "warning"), (unasked, "")):
        rows = {row.module: _cells(row, is_to_do=row.module in _to_do(report)) for row in by_module(report)}
        assert (rows["hidden"][0].text, rows["hidden"][0].tone) == ("degraded", tone)


def test_a_run_without_a_model_says_on_its_first_screen_why():
    saw = ("torch was never imported: there was nothing to inspect", "the other sentence")
    page = render(RunReport("a.py", "ended", saw=saw), ".html")
    assert "Torch was never imported: there was nothing to inspect The other sentence" in " ".join(
        part(page, "section", "panel").split()
    )
    assert page.count("the other sentence") == 0


def test_the_map_shows_shapes_only_if_one_is_to_change():
    parts = (ModelPart("Net", analyse(broken(module="hidden", tensor="hidden"))),)
    for is_detail, column in ((False, ("shapes",)), (True, ())):
        notes = module_notes(replace(with_speed(*parts), is_shape_detail=is_detail))["Net"]
        assert tuple(name for name, _ in notes.columns if name == "shapes") == column


# -- in a browser ---------------------------------------------------------------------------------------------------


def covered(page: Any) -> float:
    """Share of the first screen that the curve, the map and the time strip cover."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".explorer figure.losses, .explorer .rows, .explorer figure.steps")]
        .map((each) => each.getBoundingClientRect())
        .map(({ left, right, top, bottom }) => Math.max(0, Math.min(right, innerWidth) - Math.max(left, 0))
          * Math.max(0, Math.min(bottom, innerHeight) - Math.max(top, 0)))
        .reduce((sum, each) => sum + each, 0) / (innerWidth * innerHeight)"""
    )


def marked(page: Any) -> list[str]:
    """The names of the culprit's rows that are seen without scrolling anything."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".explorer tbody tr.marked")].filter((row) => {
          const [one, all] = [row, row.closest(".rows")].map((each) => each.getBoundingClientRect());
          return one.top >= all.top && one.bottom <= all.bottom && one.bottom <= innerHeight;
        }).map((row) => row.dataset.name)"""
    )


def many_blocks(blocks: int) -> Any:
    """A broken run of many equal blocks, whose culprit is one layer of the seventieth."""
    made = broken(module="blocks.70.fc1", tensor="blocks.70.fc1")
    names = [f"blocks.{block}.{name}" for block in range(blocks) for name in ("fc1", "fc2")]
    window = made.windows[0]
    each = next(iter(window.tensors.values()))
    windows = tuple(
        replace(old, tensors={TensorKey(name, "activation_gradient"): each for name in names}) for old in made.windows
    )
    watched = tuple(TensorInfo(name, "activation_gradient", name, "Linear") for name in names)
    return replace(made, windows=windows, watched=watched)


@pytest.mark.parametrize("name", ["broken", "150 layers", "healthy"])
def test_the_picture_covers_most_of_the_first_screen(name: str, show: Any) -> None:
    session = {"broken": broken(), "150 layers": many_blocks(75), "healthy": SESSIONS["word_model"]}[name]
    page = show(of_run(session))
    assert covered(page) >= 0.6
    assert page.evaluate("document.documentElement.scrollWidth") <= SCREEN["width"]


@pytest.mark.parametrize("several", [False, True])
def test_the_culprit_is_seen_without_a_click(several: bool, show: Any) -> None:
    parts = [ModelPart("Net", analyse(broken()))]
    if several:
        parts.insert(0, ModelPart("Healthy", analyse(SESSIONS["word_model"])))
    page = show(RunReport("a.py", "ended", tuple(parts)))
    page.wait_for_selector(".explorer tr.marked")
    assert marked(page) == ["blocks.1.fc1"]
    assert "step 4" in page.text_content(".explorer .opening")
    assert page.input_value(".explorer label:has-text('Format') select") == "float16"
    assert page.text_content(".explorer .scale output") == "2048 (2¹¹)"


def test_of_a_folded_group_the_culprit_alone_is_unfolded(show: Any) -> None:
    page = show(of_run(many_blocks(75)))
    assert marked(page) == ["blocks.70.fc1"]
    assert page.locator(".explorer tbody tr[data-name]").count() == 3


def test_a_finding_shows_its_rows_and_the_way_back(show: Any) -> None:
    page = show(of_run(broken()))
    assert page.is_hidden("[title='back to where it began']")
    page.click(".panel .finding[data-step] summary")
    assert page.get_attribute(".explorer tr.chosen", "data-name") == "blocks.1.fc1"
    assert "step 5" in page.text_content(".explorer .said")
    # The verdict stays in sight.
    assert page.is_hidden(".explorer .detail")
    page.click("[title='back to where it began']")
    assert page.locator(".explorer tr.chosen").count() == 0
    assert "step 4" in page.text_content(".explorer .opening")


def test_the_handle_is_dragged_along_the_axis_of_the_map(show: Any) -> None:
    page = show(of_run(broken()))
    edge = page.locator(".explorer svg .grip").bounding_box()
    strip = page.locator(".explorer tbody canvas").first.bounding_box()
    now = "[...document.querySelectorAll('.explorer svg .now')].map((each) => +each.getAttribute('x1'))"
    assert page.evaluate(now)[0] == pytest.approx(edge["x"] + edge["width"] / 2 - strip["x"], abs=2)
    page.mouse.move(edge["x"] + 6, edge["y"] + 8)
    page.mouse.down()
    page.mouse.move(edge["x"] + 6 + strip["width"] / 8, edge["y"] + 8, steps=4)
    page.mouse.up()
    moved = page.locator(".explorer svg .grip").bounding_box()
    assert moved["x"] > edge["x"] + strip["width"] / 10
    # A smaller scale moves the edge to the right, and the address keeps it.
    scale = int(re.search(r"scale=(-?\d+)", page.evaluate("location.hash"))[1])
    assert scale < 11
    assert page.locator(".explorer input[type=range]").first.input_value() == str(scale)


def test_code_is_copied(show: Any) -> None:
    report = of_run(broken())
    verdict = replace(report.parts[0].ranges.verdict, code="y = f(x.float())")
    report = replace(report, parts=(ModelPart("Net", replace(report.parts[0].ranges, verdict=verdict)),))
    page = show(report, permissions=["clipboard-read", "clipboard-write"])
    page.click(".panel .copy >> nth=0")
    page.wait_for_selector(".panel .copy:text('copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "y = f(x.float())"


def test_a_format_that_loses_nothing_has_a_sentence_in_place_of_an_empty_curve(show: Any) -> None:

    session = replace(SESSIONS["word_model"], precision=Precision({"float32": 100}, autocast=("bfloat16",)))
    page = show(RunReport("a.py", "ended", (ModelPart("Net", analysing.analyse(session)),)))
    assert "BF16 flushes only below 2⁻¹³⁴" in page.text_content(".explorer .losses .readout")
    assert page.locator(".explorer .losses svg").count() == 0
    assert covered(page) >= 0.6
    page.click("text=what would FP16 do?")
    assert page.locator(".explorer .losses svg .flushes").is_visible()


def test_without_scripts_the_verdict_the_findings_and_the_tables_are_shown(show: Any) -> None:
    page = show(of_run(broken()), awaited="", java_script_enabled=False)
    assert page.is_visible(".state:text('Error')")
    page.click(".panel .finding summary >> nth=0")
    assert page.is_visible(".panel .finding[open] p >> nth=0")
    assert page.is_visible("table")
    assert page.locator("table").first.bounding_box()["y"] < SCREEN["height"]


def test_a_printed_page_is_no_wider_than_a_browser_shrinks(show: Any) -> None:
    # A4 in pixels without margins. BF16's range has the most powers of two.
    session = replace(broken(), precision=Precision({"float32": 100}, autocast=("bfloat16",)))
    page = show(with_speed(ModelPart("Net", analyse(session))))
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") < 1.5 * 718
    assert page.is_visible(".tab")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_everyone_can_read_a_runs_page(scheme: str, width: int, axe: str, show: Any) -> None:
    viewport = {"width": width, "height": 800}
    page = show(of_run(broken()), color_scheme=scheme, viewport=viewport)
    page.click(".panel .finding summary >> nth=0")
    page.click(".explorer .help summary")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []


def test_a_layer_has_a_view_of_its_own(show: Any) -> None:
    both = broken()
    extra = {TensorKey("blocks.1.fc1", "activation"): sessions.bell(-2)}
    with_outputs = sessions.session(extra).windows[0].tensors
    windows = tuple(replace(window, tensors={**window.tensors, **with_outputs}) for window in both.windows)
    infos = (*both.watched, TensorInfo("blocks.1.fc1", "activation", "blocks.1.fc1", "Linear"))
    report = of_run(replace(both, windows=windows, watched=infos))
    page = show(report, "#kind=activation_gradient&scale=3&block=2")
    assert page.is_hidden(".explorer .detail")
    page.click(".explorer tr[data-name='blocks.1.fc1']")
    assert page.text_content(".detail h3") == "blocks.1.fc1"
    # A bar for each power of two that was counted, and a line over the run.
    (window,) = (each for key, each in both.windows[2].tensors.items() if key.name == "blocks.1.fc1")
    bars = page.locator(".detail svg").first.locator("rect[class^=bar-]")
    assert bars.count() == sum(count > 0 for count in window.histogram.counts)
    assert page.locator(".detail .curve.largest").count() == 1
    assert page.locator(".detail text.bad").count() == 5
    # The module's tensors lie on one axis, and the others are one click away.
    tensors = page.locator(".detail .tensor").all_text_contents()
    assert tensors == ["the output0% flushed", "gradient of the output0% flushed"]
    small = page.locator(".detail .tensor + svg")
    assert [each.locator("rect[class^=bar-]").count() > 0 for each in small.all()] == [True, True]
    page.click(".detail .tensor button:has-text('the output')")
    assert page.input_value(".explorer label:has-text('Tensors') select") == "activation"
    again = show(report, page.evaluate("location.hash"))
    assert again.text_content(".detail h3") == "blocks.1.fc1"
    page.keyboard.press("Escape")
    assert page.is_hidden(".explorer .detail")
    assert page.is_visible(".panel")


@pytest.mark.parametrize("is_narrow", [False, True])
def test_the_code_that_keeps_a_layer_in_fp32_does_so(is_narrow: bool) -> None:
    import torch

    code = in_node(
        "console.log(JSON.stringify(fp32Code(given.module, given.narrow)));", {"module": "0.1", "narrow": is_narrow}
    )
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 3)), torch.nn.Linear(3, 2))
    if is_narrow:
        model.bfloat16()
    seen = []
    exec(code, {"model": model, "torch": torch})
    model[0][1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(5, 4))
    assert seen == [torch.float32]
    assert output.dtype == torch.bfloat16
    assert in_node("console.log(JSON.stringify(fp32Code(given, false)));", "") == ""


@pytest.mark.parametrize("width", [1440, 390])
def test_tabs_need_no_script_and_have_an_address(width: int, axe: str, show: Any) -> None:
    report = with_speed(ModelPart("Net", analyse(broken())))
    plain = show(report, awaited="", java_script_enabled=False, viewport={"width": width, "height": 900})
    for name, other in (("kernels", "shapes"), ("shapes", "kernels")):
        plain.click(f"label[for=tab-{name}]")
        assert plain.is_visible(f".tab.{name}")
        assert plain.is_hidden(f".tab.{other}")
        assert plain.is_hidden(".picture")
    page = show(report, viewport={"width": width, "height": 900})
    page.click("label[for=tab-kernels]")
    page.evaluate(axe)
    assert [each["id"] for each in page.evaluate("axe.run()")["violations"]] == []
    again = show(report, page.evaluate("location.hash"), awaited="")
    assert again.is_visible(".tab.kernels")
    # The map is drawn once it is shown.
    again.click("label[for=tab-ranges]")
    again.wait_for_selector(".explorer tr.marked")
    assert again.locator(".explorer tr.marked canvas").first.bounding_box()["width"] > 100


def two_runs() -> DiffReport:
    """A healthy run and one whose gradients of two layers lie eight powers of two lower from step 5 on."""
    first = sound()
    low = {"blocks.0.fc1", "head"}
    shifted = each_tensor(
        first, lambda key, each: replace(each, histogram=each.histogram.shifted(-8 * (key.name in low)))
    )
    return diff(first, replace(first, windows=(*first.windows[:5], *shifted.windows[5:])))


def test_a_page_on_two_runs_begins_with_the_changes():
    page = render(two_runs(), ".html")
    assert "They part at step 5" in part(page, "header", "bar")
    assert "They part at step 5: " in part(page, "section", "panel")
    same = sound()
    assert "Both runs are healthy." in part(page, "section", "panel")
    assert "No difference" in part(render(diff(same, same), ".html"), "header", "bar")
    assert "Both runs are healthy." not in part(render(diff(same, broken()), ".html"), "section", "panel")
    assert "Only B is broken" in part(render(diff(same, broken()), ".html"), "header", "bar")
    equal = diff(same, same)
    ranges = equal.models[0].ranges
    to_fix = replace(ranges.second, verdict=replace(ranges.second.verdict, healthy=False))
    one = replace(equal, models=(replace(equal.models[0], ranges=replace(ranges, second=to_fix)),))
    assert "B alone is not healthy" in part(render(one, ".html"), "header", "bar")


@pytest.mark.parametrize("width", [1440, 390])
def test_both_maps_and_their_difference_share_an_axis(width: int, axe: str, show: Any) -> None:
    page = show(two_runs(), awaited=".compared tbody tr", viewport={"width": width, "height": 900})
    rows = page.locator(".compared tbody tr")
    assert {each.get_attribute("title") for each in rows.locator("th button").all()} == {"blocks.0.fc1", "head"}
    # The headline's tensor is the first.
    assert rows.first.get_attribute("class") == "moved marked"
    assert rows.first.locator("th button").get_attribute("title") == two_runs().models[0].ranges.moved.name
    assert page.locator(".compared tr.marked").count() == 1
    assert "4 tensors that did not move are hidden" in page.text_content(".explorer .said")
    assert rows.first.locator("canvas").count() == 3
    # Up at the powers of two where B has more, eight below those where A has.
    inked = """canvas => {
      const { width, height } = canvas;
      const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
      const columns = (from, to) => Array.from({ length: width }, (_, x) => x)
        .filter((x) => { for (let y = from; y < to; y++) if (data[4 * (y * width + x) + 3] > 0) return true; return false; });
      return [columns(0, height / 2 - 2), columns(height / 2 + 2, height)]
        .map((found) => found.reduce((sum, x) => sum + x, 0) / found.length);
    }"""
    more, less = rows.first.locator("canvas").nth(2).evaluate(inked)
    assert more < less
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate(axe)
    assert [(each["id"], each["nodes"][0]["html"]) for each in page.evaluate("axe.run()")["violations"]] == []
    # Before step 5 the runs are equal.
    whole = rows.first.locator("canvas").nth(2).evaluate("canvas => canvas.toDataURL()")
    steps = page.locator(".explorer input[type=range]")
    steps.fill("2")
    assert page.text_content(".explorer output") == "step 2"
    assert rows.first.locator("canvas").nth(2).evaluate("canvas => canvas.toDataURL()") != whole
    page.click("text=show the whole run")
    assert page.text_content(".explorer output") == "the whole run"
    assert page.is_hidden("text=show the whole run")
    # The whole run is no place on the slider, which is full.
    assert steps.evaluate("each => [each.value === each.max, each.className]") == [True, "whole"]
    for key, shown_steps in (("ArrowRight", "step 0"), ("ArrowLeft", "the whole run")):
        steps.press(key)
        assert page.text_content(".explorer output") == shown_steps
    page.check(".explorer input[type=checkbox]")
    assert rows.count() == 6
    # A layer leads to its own view in B.
    page.click(".compared tbody button")
    page.wait_for_selector(".detail h3")
    assert page.input_value("[data-widget] select >> nth=0") == "1"


def test_runs_in_two_formats_are_each_drawn_in_their_own(show: Any) -> None:
    first = sound()
    runs = [
        replace(first, precision=Precision({"float32": 100}, autocast=(dtype,))) for dtype in ("bfloat16", "float16")
    ]
    page = show(diff(*runs), awaited=".compared tbody tr")
    titles = page.locator(".compared th.map b")
    assert titles.all_text_contents() == ["A, BF16", "B, FP16", "B minus A"]
    # The same counts: one run's edges lie within the map, the other's beyond it.

    def drawn():
        return [
            canvas.evaluate("canvas => canvas.toDataURL()")
            for canvas in page.locator(".compared tbody canvas").all()[:2]
        ]

    assert len({*drawn()}) == 2
    format = page.locator(".explorer .controls select").nth(2)
    assert format.locator("option").first.text_content() == "BF16, FP16"
    format.select_option("float16")
    assert titles.all_text_contents() == ["A, if FP16", "B, FP16", "B minus A"]
    assert len({*drawn()}) == 1
    # The address keeps either choice.
    page.reload()
    page.wait_for_selector(".compared tbody tr")
    assert titles.all_text_contents()[0] == "A, if FP16"
    format.select_option("own")
    page.reload()
    page.wait_for_selector(".compared tbody tr")
    assert titles.all_text_contents()[0] == "A, BF16"


def several_models() -> DiffReport:
    """Two runs of two models, of which the second alone differs."""
    made = two_runs().models[0].ranges
    same = compare_ranges(made.first, made.first)
    side = Side("runs/a", "two models")
    return DiffReport(side, replace(side, path="runs/b"), (ModelDiff("Critic", same), ModelDiff("Generator", made)))


def test_a_page_on_several_models_of_two_runs_begins_with_the_changes():
    page = render(several_models(), ".html")
    assert "They part at step 5" in part(page, "header", "bar")
    panel = part(page, "section", "panel")
    assert panel.index("Generator: They part at step 5") < panel.index("Critic: The ranges do not differ")
    assert 'data-names="[&quot;Generator: A&quot;, &quot;Generator: B&quot;, &quot;Critic: A&quot;' in page
    assert page.index("data-widget") < page.index("<table")


def test_a_switch_leads_to_the_maps_of_each_model_of_two_runs(show: Any) -> None:
    page = show(several_models(), awaited=".compared tbody tr")
    assert page.locator(".compared tbody tr").count() == 2
    switch = page.locator("[data-widget] select").first
    options = switch.locator("option").all_text_contents()
    assert options[:2] == ["Generator: A, B, difference", "Critic: A, B, difference"]
    switch.select_option(index=1)
    # The Critic's did not move: they are shown all the same.
    page.wait_for_selector(".explorer .said:text('None moved beyond its normal variation; all are shown.')")
    assert page.locator(".compared tbody tr").count() == 6
    # A finding leads to its model.
    page.click(".panel .finding summary >> nth=0")
    page.wait_for_selector(".explorer tr[data-name]")
    assert switch.evaluate("select => select.selectedOptions[0].textContent") == "Generator: B"


def test_a_culprit_that_was_not_counted_has_the_only_coloured_row(show: Any) -> None:
    page = show(of_run(broken(module="blocks.1", tensor="blocks.1")))
    rows = page.locator(".explorer tbody tr:not([aria-hidden])")
    names = [row.locator("th").text_content() for row in rows.all()]
    assert names == ["embed", "blocks.0.fc1", "blocks.0.fc2", "blocks.1", "blocks.1.fc1", "blocks.1.fc2", "head"]
    (culprit,) = page.locator(".explorer tr.marked").all()
    assert culprit.text_content() == "blocks.1first NaN, step 5 (shown: step 4, before it)"
    # No values stand in for those that were not counted.
    assert culprit.locator("canvas").count() == 0
    assert [row.get_attribute("data-name") for row in page.locator(".explorer tr.near").all()] == names[4:6]
    # Keys pass over it, and after the event its consequences have no colour.
    page.focus(".explorer .rows")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    assert page.get_attribute(".explorer tr.chosen", "data-name") == "blocks.1.fc1"
    page.click("text=show the whole run")
    assert page.locator(".explorer td.error").count() == 0
    assert page.locator(".explorer td.dim:text('○')").count() == 6


def found_in(layer: str, step: int | None = 3, id: str = "clip-before-unscale") -> RunReport:
    """A run whose only finding, an error, is of this layer ("": of none)."""

    ranges = analysing.analyse(sound())
    finding = Finding(id, "error", layer, "It is.", {}, step=step)
    ranges = replace(ranges, findings=(finding,), verdict=replace(ranges.verdict, healthy=False))
    return RunReport("a.py", "ended", (ModelPart("N", ranges),))


def test_a_culprits_row_names_the_steps_of_its_figures(show: Any) -> None:
    page = show(of_run(broken()))
    why = page.locator(".explorer tr.marked .why")
    assert why.text_content() == "first NaN, step 5 (shown: step 4, before it)"
    # The healthy figures of another step do not stand on the colour of the fault.
    figures = page.locator(".explorer tr.marked td")
    colours = figures.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell).backgroundColor)")
    assert [colour == "rgba(0, 0, 0, 0)" for colour in colours] == [False, *[True] * (len(colours) - 1)]
    # In the step itself, and in the whole run, the figures show the fault.
    page.locator(".explorer figure.steps input").press("ArrowRight")
    assert page.text_content(".explorer figure.steps output") == "shown: step 5"
    assert not why.is_visible()
    page.click("text=show the whole run")
    assert not why.is_visible()


@pytest.mark.parametrize(
    ("skipped", "words"), [(True, "before the trouble began, update skipped"), (False, "before the trouble began")]
)
def test_grey_marks_before_the_trouble_are_explained(skipped: bool, words: str, show: Any) -> None:
    session = broken()
    earlier = replace(session.events[0], step=2, phase="backward", value="inf", skipped=skipped, forward_finite=True)
    # Without an update of gradients that are not finite the event is harmless.
    earlier = earlier if skipped else replace(earlier, phase="forward", forward_finite=None, gradients_finite=True)
    page = show(of_run(replace(session, events=(earlier, *session.events))))
    assert page.locator(".explorer svg .event.earlier").count() == 1
    legend = page.locator(".explorer figure.steps .entry").all_text_contents()
    assert [each for each in legend if "began" in each] == [words]
    # The red cross is that of an infinity, which occurred before alone.
    assert "first NaN of a step" in legend
    assert "first infinity of a step" not in legend


@pytest.mark.parametrize("width", [1440, 1200])
def test_the_controls_of_a_wide_page_have_one_line(width: int, show: Any, axe: str) -> None:
    parts = tuple(ModelPart(name, analyse(eventful())) for name in ("Generator", "Discriminator"))
    page = show(RunReport("a.py", "ended", parts), viewport={**SCREEN, "width": width})
    page.locator(".explorer input[type=range]").first.fill("12")
    controls = page.locator(".explorer .controls >> nth=0")
    for words in ("Model", "2 events", "back"):
        assert words in controls.text_content()
    assert controls.bounding_box()["height"] < 40
    assert controls.evaluate("each => each.scrollWidth <= each.clientWidth")
    page.evaluate(axe)
    assert page.evaluate("axe.run()")["violations"] == []


def test_an_overflow_is_no_redder_than_the_verdict(show: Any) -> None:
    for session, tone in ((broken(), "error"), (sound(), "warning")):
        page = show(of_run(session), "#scale=40")
        cells = page.locator(".explorer tbody td.overflow")
        assert {each.get_attribute("class") for each in cells.all()} == {f"overflow {tone} "}


def test_a_step_that_did_not_end_is_named_beside_those_that_did(show: Any) -> None:
    for step, words in ((5, "10 steps, 0 to 9"), (10, "10 steps, 0 to 9; step 10 unfinished")):
        ended = replace(broken(step), progress=replace(broken(step).progress, ended=True))
        page = show(of_run(ended))
        assert page.text_content(".explorer figure.steps b") == words
        assert "10 steps" in page.text_content(".bar .facts")


def test_a_marked_row_says_why_where_its_own_figures_do_not(show: Any) -> None:
    page = show(found_in("blocks.0.fc2"))
    (row,) = page.locator(".explorer tr.marked").all()
    words, *figures = row.locator("td:visible").all_text_contents()
    assert (words, figures[:3]) == ("Clip before unscale, step 3", ["0%", "0%", "none"])
    assert row.locator(".why").is_visible()
    assert page.locator(".explorer tr:not(.marked) .why:visible").count() == 0
    # The signs have a meaning on hover, and one in the list of terms.
    for place, sign in ((0, "Hatched on the left"), (1, "round to zero"), (2, "- with infinities"), (3, "✕")):
        assert sign in row.locator("td:visible").nth(place).get_attribute("title")
    assert "✕: infinities" in page.locator(".terms dt:text('signs of the map') + dd").text_content()
    # Figures that show the fault need no words.
    page.select_option(".explorer select >> nth=1", "float8_e4m3")
    assert not row.locator(".why").is_visible()
    assert "%" in row.locator("td:visible").nth(1).text_content()


@pytest.mark.parametrize("wide", [390, 700, 1024, 1440])
def test_the_facts_of_the_bar_are_whole_or_absent(show: Any, wide: int) -> None:
    page = show(of_run(broken()), viewport={"width": wide, "height": 844})
    facts = page.locator(".bar .facts")
    box = facts.bounding_box()
    spans = [(span.text_content(), span.bounding_box()) for span in facts.locator("span").all()]
    shown = [(text, at) for text, at in spans if at["y"] + at["height"] <= box["y"] + box["height"] + 1]
    assert len(shown) >= 2
    assert len(shown) == len(spans) or wide > 1000
    assert all(at["x"] >= 0 and at["x"] + at["width"] <= min(wide, box["x"] + box["width"]) + 1 for _, at in shown)
    # The others begin below the bar's one line.
    assert all(at["y"] >= box["y"] + box["height"] - 1 for text, at in spans if (text, at) not in shown)
    assert facts.get_attribute("title") == "; ".join(text for text, _ in spans)


def test_narrow_regions_of_a_format_are_named_as_far_as_the_names_have_room(show: Any) -> None:
    for wide, expected in ((1440, 4), (1024, 4), (390, 1)):
        page = show(of_run(broken()), viewport={"width": wide, "height": 844})
        boxes = [each.bounding_box() for each in page.locator(".explorer svg .zone").all()]
        assert len(boxes) >= expected
        # A halo of 3 pixels belongs to each box.
        assert all(one["x"] + one["width"] - 6 < other["x"] for one, other in pairwise(boxes))
        field = page.locator(".explorer tbody tr[data-name] canvas").first.bounding_box()
        # The first one may stand left of the map, beside its region's edge.
        assert boxes[0]["x"] >= 0
        assert all(field["x"] - 4 <= box["x"] for box in boxes[1:])
        assert all(box["x"] + box["width"] <= field["x"] + field["width"] + 4 for box in boxes)


def test_a_fault_outside_of_the_layers_leaves_all_rows_pale(show: Any) -> None:
    page = show(found_in(""))
    in_layer = show(found_in("blocks.0.fc2"))
    strips = [each.locator(".explorer figure.steps svg").first.bounding_box() for each in (page, in_layer)]
    # Without an event the steps have no more to show.
    assert strips[0]["height"] == pytest.approx(strips[1]["height"], rel=0.1)
    for each in (page, in_layer):
        # Steps 3 to 9 of 0 to 9.
        shaded = each.locator(".explorer rect.since").bounding_box()
        axis = each.locator(".explorer figure.steps path.axis").bounding_box()
        assert shaded["width"] / axis["width"] == pytest.approx(6 / 9, abs=0.01)
        assert each.text_content(".explorer text.since") == "step 3"
    faded = "canvas => Number(getComputedStyle(canvas).opacity)"
    assert page.locator(".explorer tbody canvas").first.evaluate(faded) < 1
    assert in_layer.locator(".explorer tbody canvas").first.evaluate(faded) == 1
    assert covered(page) >= 0.6
    assert page.locator(".explorer tr.culprit").text_content() == "no single layerClip before unscale, step 3"


def test_without_a_loss_scale_the_steps_show_the_largest_magnitude(show: Any) -> None:
    scaled = sound()
    bare = replace(scaled, progress=replace(scaled.progress, scales=()))
    for session, curve, other in ((scaled, "scales", "largest"), (bare, "largest", "scales")):
        page = show(of_run(session))
        assert page.get_attribute(f".explorer figure.steps .curve.{curve}", "d")
        assert not page.get_attribute(f".explorer figure.steps .curve.{other}", "d")
        assert page.locator(".explorer rect.since").count() == 0


def test_gradients_that_add_up_have_a_curve_of_their_sum(show: Any) -> None:
    held = [LeftOver(step=step, parameters=6, of=6, largest=2.0**at) for step, at in ((1, -3), (2, -1), (4, 1))]
    scaled = replace(broken(nan_from=99), events=(), measurements=tuple(each.measurement() for each in held))
    bare = replace(scaled, progress=replace(scaled.progress, scales=()))
    for session, sums in ((bare, ["step 1: 2⁻³", "step 2: 2⁻¹", "step 4: 2¹"]), (scaled, [])):
        page = show(of_run(session))
        steps = page.locator(".explorer figure.steps")
        assert steps.locator("rect.held title").all_text_contents() == sums
        # A loss scale has an axis of its own.
        assert ("largest magnitude in .grad, their sum" in steps.text_content()) is bool(sums)
        assert page.text_content(".explorer .opening").endswith(
            "The map shows each backward's own gradients; the optimizer takes .grad, the sum of all so far."
        )
    # The sums lie on the axis of the magnitudes, each at its step.
    page = show(of_run(bare))
    places = [each.bounding_box() for each in page.locator(".explorer rect.held").all()]
    assert places[2]["x"] - places[1]["x"] == pytest.approx(2 * (places[1]["x"] - places[0]["x"]), abs=0.5)
    assert places[0]["y"] - places[1]["y"] == pytest.approx(places[1]["y"] - places[2]["y"], abs=0.5)


def test_infinities_and_nans_have_a_share_a_mark_and_a_sentence_beside_the_curve(show: Any) -> None:
    session = sound()
    whole = session.windows[0].tensors
    bad = ExponentHistogram.from_counts([5], -6, zeros=1, infs=3, nans=1)
    some = {key: replace(each, histogram=bad) for key, each in whole.items() if key.name == "head"}
    windows = (replace(session.windows[0], tensors={**whole, **some}), *session.windows[1:])
    page = show(of_run(replace(session, windows=windows)))
    page.click("text=show the curve")
    beside = page.locator(".explorer .readout .bad")
    assert beside.count() == 1
    page.fill(".explorer figure.steps input[type=range]", "1")
    assert beside.count() == 0
    page.fill(".explorer figure.steps input[type=range]", "0")
    assert beside.text_content() == "up to 40% inf, NaN: the curves are of finite values"
    # No overflow of the finite values would pass for health.
    for name, words in (("head", ["", "0%", "-", "✕○ 40%"]), ("embed", ["", "0%", "0%", "none"])):
        assert page.locator(f".explorer tr[data-name={name}] td:visible").all_text_contents() == words
    # The bar at the right end of the strip is as high as its share, as those of the powers of two are.
    colours = page.eval_on_selector_all(
        ".explorer tr[data-name] canvas",
        """all => all.map((canvas) => {
          const row = canvas.getContext("2d").getImageData(0, canvas.height - 4, canvas.width, 1).data;
          const at = (x) => [...row.slice(4 * x, 4 * x + 4)].join();
          return at(canvas.width - 28) === at(canvas.width - 40);
        })""",
    )
    assert colours == [True] * 5 + [False]


@pytest.mark.parametrize(("floor", "zeros"), [(-24, 4), (-24, 0), (None, 4)])
def test_the_figures_beside_the_curve_say_that_zeros_may_have_been_values(
    floor: int | None, zeros: int, show: Any
) -> None:
    ranges = found_in("head", id="scale-too-low").parts[0].ranges
    counts = ExponentHistogram.from_counts([5] * 12, -20, zeros=zeros)
    counted = each_tensor(ranges.session, lambda key, each: replace(each, histogram=counts))
    layers = tuple(replace(layer, floor_exponent=floor) for layer in ranges.layers)
    ranges = replace(ranges, layers=layers, session=counted)
    run = RunReport("a.py", "ended", (ModelPart("N", ranges),))
    page = show(run)
    beside = page.text_content(".explorer figure.losses .readout")
    assert "overflow" in beside
    for words in (beside, page.text_content(".explorer .said")):
        assert ("zeros may have been values" in words) is (floor is not None and zeros > 0)


def test_shares_have_one_notation_on_the_map(show: Any) -> None:
    """Zeros may have been values in one layer and not in another: the shares of the others are shares all the same."""
    page = show(of_run(SESSIONS["everything"]))
    page.select_option(".explorer select >> nth=1", "float8_e4m3")
    page.fill(".explorer .scale input, .explorer figure.losses input[type=range]", "0")
    rows = page.eval_on_selector_all(
        ".explorer tr[data-name]:not(.marked)",
        "rows => rows.map(row => [+row.dataset.flushed / (+row.dataset.all || 1), +row.dataset.all, row.cells[2].textContent])",
    )
    assert rows
    for flushed, counted, words in rows:
        assert words == (percent(flushed) if counted else "-")
    assert "seen" not in page.inner_text(".explorer .rows")


def test_of_zeros_alone_a_sentence_stands_in_place_of_the_curve(show: Any) -> None:
    bare = sound()
    zeros = ExponentHistogram.from_counts([], 0, zeros=5)
    silent = each_tensor(bare, lambda key, each: replace(each, histogram=zeros))
    session = replace(silent, progress=replace(bare.progress, scales=()))
    words = show(of_run(session)).locator(".explorer figure.steps svg text").all_text_contents()
    assert "no finite non-zero value was counted" in words


def test_a_phone_shows_the_column_of_the_fault(show: Any) -> None:
    page = show(of_run(broken()), viewport=PHONE)
    heads = page.locator(".explorer thead th:visible")
    assert heads.all_text_contents()[2] == "flushed"
    page.click("text=show the whole run")
    assert heads.all_text_contents()[2] == "inf, NaN"
    assert "○" in page.locator(".explorer tr.marked td:visible").nth(1).text_content()


def test_the_curve_is_folded_where_no_scale_would_help(show: Any) -> None:
    page = show(of_run(broken()))
    assert page.locator(".explorer .losses .curve").count() == 0
    assert page.locator(".explorer .losses .grip").count() == 1
    assert "at loss scale 2048 (2¹¹): " in page.text_content(".explorer .said")
    assert "Shown: step 4, " in page.text_content(".explorer .opening")
    # Beside another choice the sentence about the steps is gone.
    page.select_option(".explorer select >> nth=1", "bfloat16")
    assert page.is_hidden(".explorer .opening")
    assert "at loss scale 2048 (2¹¹), that of step 4: " in page.text_content(".explorer .said")
    page.select_option(".explorer select >> nth=1", "float16")
    folded = page.locator(".explorer .rows").bounding_box()["height"]
    page.click("text=show the curve")
    assert page.locator(".explorer .losses .curve.flushes").count() == 1
    assert page.locator(".explorer .rows").bounding_box()["height"] < folded
    assert covered(page) >= 0.6
    page.click("text=hide the curve")
    assert page.locator(".explorer .rows").bounding_box()["height"] == folded


def test_on_a_phone_the_first_screen_has_the_change_and_the_culprit(show: Any) -> None:
    report = of_run(broken())
    verdict = replace(
        report.parts[0].ranges.verdict, code="with torch.autocast(device_type, enabled=False):\n    y = f(x.float())"
    )
    report = replace(report, parts=(ModelPart("Net", replace(report.parts[0].ranges, verdict=verdict)),))
    page = show(report, viewport=PHONE)
    parts = [".state", ".panel .alarm", ".panel p:has-text('Change:')", ".panel pre", ".panel p:has-text('Error:')"]
    parts += [".explorer tr.marked", ".explorer figure.steps", ".explorer .said", ".panel .finding"]
    boxes = [page.locator(each).first.bounding_box() for each in parts]
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)
    assert boxes[5]["y"] + boxes[5]["height"] < PHONE["height"]
    # Names, strips and one figure have room without scrolling.
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator(".explorer .rows").evaluate("rows => rows.scrollWidth <= rows.clientWidth")
    assert page.locator(".explorer tr.marked th").evaluate("name => name.scrollHeight <= name.clientHeight")


def test_the_headline_says_where_and_when_it_began():

    report = analysing.analyse(sound())
    finding = Finding("scale-too-low", "warning", "blocks.0.fc2", "It is.", {}, step=1200)

    def headline_of(found: Finding, of: RangeReport = report) -> str:
        return began(replace(of, findings=(found, *of.findings))).headline

    assert began(report) == ("", "")
    assert headline_of(finding) == "Scale too low: worst in 'blocks.0.fc2', first in step 1,200"
    assert headline_of(replace(finding, layer="")) == "Scale too low: in the training loop, first in step 1,200"
    assert headline_of(replace(finding, step=None)) == "Scale too low: worst in 'blocks.0.fc2', throughout the run"
    in_loop = "Scale too low: in the training loop, throughout the run"
    assert headline_of(replace(finding, layer="", step=None)) == in_loop
    line, operator = {"line": "train.py:9"}, {"line": "train.py:9", "operator": "_to_copy", "phase": "forward"}
    assert headline_of(replace(finding, layer="", evidence=line)) == "Scale too low: in train.py:9, first in step 1,200"
    in_both = replace(finding, evidence=line)
    assert headline_of(in_both) == "Scale too low: worst in 'blocks.0.fc2', train.py:9, first in step 1,200"
    with_operator = replace(finding, evidence=operator)
    assert headline_of(with_operator) == (
        "Scale too low: worst in 'blocks.0.fc2', train.py:9: a cast, first in step 1,200"
    )
    in_backward = replace(with_operator, id="scale-too-high", evidence={**operator, "phase": "backward"})
    assert "high: in the backward of 'blocks.0.fc2', train.py:9: a cast, " in headline_of(in_backward)
    # Code outside of modules may be the loop's, for which the phase says nothing.
    assert headline_of(replace(with_operator, layer="")) == "Scale too low: in train.py:9: a cast, first in step 1,200"
    assert headline_of(replace(finding, id="masters-stale", layer="")) == (
        "Masters stale: in the master weights, first in step 1,200"
    )
    # The alarm beside an event's own place does not repeat it.
    of_event = analyse(broken())
    assert began(of_event) == ("Forward not finite: in 'blocks.1.fc1'", "step 5, forward, first NaN")
    assert headline_of(finding, of_event) == headline_of(finding)
    earlier = replace(finding, id="weights-exploded", severity="error", step=2)
    assert headline_of(earlier, of_event) == "Weights exploded: in 'blocks.0.fc2', first in step 2"
    own = replace(with_operator, layer="blocks.1.fc1", severity="error", step=5)
    expected = ("Scale too low: in 'blocks.1.fc1', train.py:9: a cast", "step 5, forward, first NaN")
    assert began(replace(of_event, findings=(own,))) == expected
    elsewhere = replace(finding, severity="error", step=5, evidence=line)
    assert began(replace(of_event, findings=(elsewhere,))) == ("Scale too low: in train.py:9, first in step 5", "")
    changed = replace(finding, evidence={"change_at": "train.py:7"})
    assert headline_of(changed) == "Scale too low: worst in 'blocks.0.fc2', train.py:7, first in step 1,200"
    assert headline_of(replace(changed, layer="")) == "Scale too low: in train.py:7, first in step 1,200"
    stored = replace(changed, id="masters-stale", layer="")
    assert headline_of(stored) == "Masters stale: in the master weights, first in step 1,200"


def test_the_first_screen_names_the_operator_once_and_the_phase_at_the_row(show: Any) -> None:

    evidence = {"line": "train.py:9", "operator": "mul", "phase": "forward"}
    (part_of_run,) = of_run(broken()).parts
    finding = Finding("overflow-in-operator", "error", "blocks.1.fc1", "It overflows.", evidence, step=5)
    ranges = replace(part_of_run.ranges, findings=(finding,))
    page = show(RunReport("train.py", "ended", (ModelPart("Net", ranges),)))
    assert page.text_content(".panel > p >> nth=0") == "Overflow in mul: in 'blocks.1.fc1', train.py:9"
    assert page.text_content(".panel .alarm") == "step 5, forward, first NaN"
    why = "forward, train.py:9: mul, step 5 (shown: step 4, before it)"
    assert page.text_content(".explorer tr.marked .why") == why
    assert page.text_content(".explorer .opening").startswith(
        "Activations were not counted: these are activation gradients. Shown: step 4, "
    )


def test_a_numbered_module_has_its_class_beside_it_in_every_form(show: Any, tmp_path: Path) -> None:
    session = renamed(broken(module_type="Linear"), lambda name: name.replace(".fc1", ".0").replace(".fc2", ".2"))
    report = of_run(session)
    for ending in (".md", ".txt"):
        text = report.save(tmp_path / f"a{ending}").read_text()
        assert "blocks.1.0' (Linear)" in text.replace("\\", "")
        assert "blocks.0.2 (Linear)" in text.replace("\\", "")
    page = show(report)
    assert page.text_content(".panel > p >> nth=0") == "Forward not finite: in 'blocks.1.0' (Linear)"
    assert page.text_content(".explorer tr.marked th") == "blocks.1.0 (Linear)"
    assert "'blocks.1.0' (Linear), step 5" in page.text_content(".panel .finding >> nth=0")
    # Its path leads to it.
    page.click(".panel .finding[data-step] summary")
    assert page.get_attribute(".explorer tr.chosen", "data-name") == "blocks.1.0"


def test_a_long_name_loses_its_first_parts_and_is_read_whole(show: Any) -> None:
    long = "transformer.encoder.layers.3.feedforward.c_fc"
    session = renamed(sound(), lambda name: f"{long}.{name}")
    page = show(of_run(session), viewport=PHONE)
    for row in page.query_selector_all(".explorer tbody th"):
        shown, whole = row.text_content(), row.get_attribute("aria-label")
        assert whole.startswith(f"{long}.")
        assert row.get_attribute("title") == whole
        # From a dot on.
        assert re.fullmatch(r"…[\w.]+", shown)
        assert whole.endswith(f".{shown[1:]}")
        assert row.evaluate(
            "each => each.scrollWidth <= each.clientWidth && each.scrollHeight <= each.clientHeight + 1"
        )


def test_a_map_of_one_row_fills_its_place(show: Any) -> None:
    made = broken(nan_from=99)
    one = TensorKey("head", GRADIENT)
    windows = tuple(replace(each, tensors={one: each.tensors[one]}) for each in made.windows)
    page = show(of_run(replace(made, windows=windows, events=())))
    assert covered(page) > 0.6
    assert page.locator(".explorer tbody canvas").evaluate("each => each.clientHeight") > 300


def test_the_change_of_a_broken_run_is_on_the_first_screen_of_a_comparison():
    healthy = sound()
    change = analyse(broken()).verdict.change
    for first, second, name in ((healthy, broken(), "B"), (broken(), healthy, "A"), (broken(), broken(), "B")):
        report = diff(first, second)
        panel = words_of_panel(render(report, ".html"))
        assert f"Change in {name}: {change}" in panel
        assert f"Change in {name}: " in render(report, ".txt")
        assert ("B has no such finding. Settings that differ: none that was recorded." in panel) is (name == "A")
    alike = diff(broken(), broken())
    assert "Neither is healthy" in part(render(alike, ".html"), "header", "bar")
    panel = words_of_panel(render(alike, ".html"))
    assert "Neither is healthy, in the same way: step 5, " in panel
    assert "Change in" not in render(diff(healthy, healthy), ".html")
    # A warning does not break a run beside one with an error.
    unscaled = replace(healthy, progress=replace(healthy.progress, scales=(ScaleChange(0, 1.0),)))
    assert analyse(unscaled).verdict.healthy is False
    for first, second, name in ((unscaled, broken(), "B"), (broken(), unscaled, "A")):
        panel = words_of_panel(render(diff(first, second), ".html"))
        assert f"{name}: {began(analyse(broken())).headline}" in panel
        assert f"Change in {name}: {change}" in panel


def test_settings_that_differ_are_the_change_of_the_one_broken_run_unless_they_are_its_precision():
    def with_rate(lr: float) -> OptimizerRecord:
        return OptimizerRecord("SGD", {"lr": lr}, {})

    def ran(session: Session, **precision: Any) -> Session:
        return replace(session, precision=replace(session.precision, **precision))

    healthy, change = sound(), analyse(broken()).verdict.change
    tame, wild = ran(healthy, optimizers=(with_rate(0.01),)), ran(broken(), optimizers=(with_rate(30),))
    # The capture's own settings break no run.
    wild = replace(wild, info=replace(wild.info, max_overhead=0.5))
    for runs, name, words in (
        ((tame, wild), "B", "First undo the setting: optimizer lr 0.01 -> 30. B: step 5, forward"),
        ((wild, tame), "A", "First take B's setting: optimizer lr 30 -> 0.01. A: step 5, forward"),
    ):
        report = diff(*runs)
        for suffix in (".txt", ".md", ".html"):
            said = re.sub("<[^>]*>", "", markup.unescape(render(report, suffix))).replace("\\", "")
            said = " ".join(said.replace("→", "->").split())
            assert f"{name} alone is not healthy. {words}" in said, suffix
            assert "Change in" not in said
        # It stays with the findings of B.
        assert (change in " ".join(render(report, ".txt").split())) is (name == "B")
        panel = part(render(report, ".html"), "section", "panel")
        assert "optimizer lr: " not in panel
        # Beside the settings stands the broken run's own cause.
        assert panel.split("\n")[1].strip() == f"{name}: {began(analyse(broken())).headline}"
    several = ran(wild, optimizers=(replace(with_rate(30), settings={"lr": 30, "momentum": 0.9}),))
    said = " ".join(render(diff(tame, several), ".txt").split())
    assert "First undo the settings: optimizer lr 0.01 -> 30, optimizer momentum none -> 0.9. B: " in said
    # A run in other dtypes is meant to have them.
    wide = ran(tame, autocast=("bfloat16",))
    said = " ".join(render(diff(wide, wild), ".txt").split())
    assert "differ: autocast BF16 -> FP16, optimizer lr 0.01 -> 30. B: step 5" in said
    assert f"Change in B: {change}" in said
    assert "Settings that differ: " not in headline(
        diff(tame, ran(healthy, optimizers=(with_rate(30),))).models[0].ranges
    )


def test_the_culprit_of_the_one_broken_run_is_marked_in_a_comparison(show: Any) -> None:
    healthy = sound()
    for name, runs in (("A", (broken(), healthy)), ("B", (healthy, broken())), ("A, B", (broken(), broken()))):
        page = show(diff(*runs), awaited=".compared tbody tr.near")
        assert page.locator(".compared tr.near th button").first.get_attribute("title") == "blocks.1.fc1"
        (culprit,) = page.locator(".compared tr.culprit").all()
        assert culprit.text_content() == f"blocks.1.fc1{name}: first NaN, step 5"
    report = diff(broken(2), broken())
    panel = part(render(report, ".html"), "section", "panel")
    cause = began(analyse(broken())).headline
    assert panel.split("\n")[1].strip() == f"A: {cause}. B: {cause}"
    page = show(report, awaited=".compared tbody tr.near")
    said = [each.text_content() for each in page.locator(".compared tr.culprit").all()]
    assert said == ["blocks.1.fc1B: first NaN, step 5", "blocks.1.fc1A: first NaN, step 2"]


def test_severities_differ_in_shape_and_luminance_not_in_hue_alone(show: Any) -> None:
    grave = show(of_run(broken()))

    ranges = analysing.analyse(sound())
    finding = Finding("scale-too-low", "warning", "blocks.0.fc2", "It is.", {}, step=1)
    ranges = replace(ranges, findings=(finding,), verdict=replace(ranges.verdict, healthy=False))
    mild = show(RunReport("a.py", "ended", (ModelPart("N", ranges),)))
    sign = "element => getComputedStyle(element, '::before').content.trim()"
    for page, expected in ((grave, "■"), (mild, "▲")):
        for place in (".state", ".panel .finding summary b", ".explorer tr.marked th"):
            assert expected in page.locator(place).first.evaluate(sign), place
    border = "element => getComputedStyle(element).borderLeftStyle"
    assert [page.locator(".panel .finding").first.evaluate(border) for page in (grave, mild)] == ["solid", "double"]
    # In the strip the two lines differ in their dashes.
    dashes = "line => getComputedStyle(line).strokeDasharray"
    lines = [grave.locator(f".explorer .steps .curve.{name}").evaluate(dashes) for name in ("scales", "lost-share")]
    assert len(set(lines)) == 2


def test_the_curve_has_a_bounded_share_and_is_folded_where_it_says_little(show: Any) -> None:
    page = show(of_run(sound()))
    curve, rows = (page.locator(f".explorer {each}").bounding_box()["height"] for each in ("figure.losses", ".rows"))
    assert page.locator(".explorer .losses .curve.flushes").count() == 1
    assert curve < 0.5 * rows
    # FP32 has a scale, whose edges are far from every value.
    page.select_option(".explorer select >> nth=1", "bfloat16")
    assert page.locator(".explorer .losses .curve").count() == 0


def test_the_first_screen_of_a_broken_run_names_the_costliest_finding():
    panel = part(render(with_speed(ModelPart("Net", analyse(broken()))), ".html"), "section", "panel")
    assert "kernels: costliest: gpu-idle, 92% of 3.91 ms; " in " ".join(panel.split())


def test_documents_without_a_front_have_none():
    assert document(analyse(broken()), verdict=False).front is None
    assert isinstance(analyse(broken()), RangeReport)
