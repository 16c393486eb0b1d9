"""The map of the page: its script computes the same figures as Python, and a browser shows them."""

import base64
import gzip
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import sessions
from agreeing_reports import analyse
from test_opening import broken

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges import analyse as analysing
from mpinspect.ranges.report.explorer import ModuleNotes, NoteCell, data, packed
from mpinspect.ranges.session import Precision, Progress, ScaleChange, ScalerRecord, Session
from mpinspect.ranges.windows.tensors import TensorKey
from mpinspect.reporting import html
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.forms import document, render
from mpinspect.reporting.html import fragment
from mpinspect.reporting.scripts import bundled
from mpinspect.reporting.words import percent
from mpinspect.run.report import ModelPart, RunReport

SCRIPT = bundled("mpinspect.ranges.report", "explorer")
NODE = shutil.which("node")
SESSIONS = {name: session for name, session in sessions.all_sessions().items() if session.windows}
SESSIONS["right_to_left"] = sessions.session(
    {
        TensorKey(name, "weight_gradient"): sessions.bell(-14)
        for name in ("שכבה.1.weight", "\u0645\u0634.weight", "a" * 300)
    }
)
SCALES = (-130, -24, -9, -8, -1, 0, 1, 7, 12, 13, 16, 24, 31, 40, 150)


def in_node(driver: str, given: Any) -> Any:
    """Run the script's functions under Node; return the driver's result, decoded from JSON."""
    if NODE is None:
        pytest.skip("needs Node.js, which is not installed")
    # An argument's length is limited.
    with TemporaryDirectory() as folder:
        script = Path(folder) / "script.mjs"
        script.write_text(
            f"{SCRIPT}\nconst given = JSON.parse(await new Response(process.stdin).text());\n{driver}", "utf-8"
        )
        ended = subprocess.run([NODE, str(script)], input=json.dumps(given), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def figures(histogram: ExponentHistogram) -> list[list[int]]:
    return [
        [
            histogram.flushed(format, scale),
            histogram.subnormal(format, scale),
            *histogram.overflowed_bounds(format, scale),
        ]
        for format in FORMATS.values()
        for scale in SCALES
    ]


@pytest.mark.parametrize("name", SESSIONS)
def test_every_figure_is_that_of_python(name: str) -> None:
    session = SESSIONS[name]
    report = analyse(session)
    given = data(report)
    told = in_node(
        "const figures = (h) => given.formats.flatMap((f) => given.scales.map((k) =>"
        " [flushed(h, f, k), subnormal(h, f, k), ...overflowed(h, f, k)]));"
        "console.log(JSON.stringify(given.tensors.map((t) => { const parts = t.blocks.map((b) => b && unpack(b));"
        " return [...parts.map((h) => h && figures(h)), figures(merge(parts.filter(Boolean)))]; })));",
        {**given, "scales": SCALES},
    )
    keys = [layer.key for layer in report.layers if layer.samples and layer.kind != "update"]
    assert len(told) == len(keys) == len(given["tensors"])
    totals = session.totals()
    for key, of_blocks in zip(keys, told, strict=True):
        assert of_blocks[-1] == figures(totals[key].histogram), key
        assert len(of_blocks) == len(given["blocks"]) + 1
    if len(given["blocks"]) == len(session.windows):
        for key, of_blocks in zip(keys, told, strict=True):
            windows = [window.tensors.get(key) for window in session.windows]
            assert of_blocks[:-1] == [None if each is None else figures(each.histogram) for each in windows], key


def test_edges_of_every_format() -> None:
    """Counts on each side of a flush edge and an overflow edge, powers of two and significands near 2 among them."""
    histograms = [
        ExponentHistogram.from_counts([9], exponent, powers_of_two=[2], near_top=[3])
        for format in FORMATS.values()
        for exponent in {format.min_subnormal_exponent - 1, format.min_normal_exponent, format.max_exponent}
    ]
    histograms.append(merge(histograms))
    from mpinspect.ranges.report import explorer

    told = in_node(
        "console.log(JSON.stringify(given.histograms.map(unpack).map((h) => given.formats.flatMap((f) =>"
        " given.scales.map((k) => [flushed(h, f, k), subnormal(h, f, k), ...overflowed(h, f, k)])))));",
        {
            "histograms": [explorer._histogram(histogram) for histogram in histograms],
            "formats": data(analyse(sessions.word_model()))["formats"],
            "scales": SCALES,
        },
    )
    assert told == [figures(histogram) for histogram in histograms]


def test_the_share_of_the_sum_of_magnitudes_is_pythons_estimate() -> None:
    histograms = [window.histogram for window in sessions.everything().totals().values()]
    formats = data(analyse(sessions.word_model()))["formats"]
    from mpinspect.ranges.report import explorer

    told = in_node(
        "console.log(JSON.stringify(given.histograms.map(unpack).map((h) => given.formats.map((f) =>"
        " given.scales.map((k) => lostMass(h, f, k))))));",
        {"histograms": [explorer._histogram(each) for each in histograms], "formats": formats, "scales": SCALES},
    )
    expected = [
        [[each.lost_l1_share(format, scale).estimate for scale in SCALES] for format in FORMATS] for each in histograms
    ]
    assert np.array(told) == pytest.approx(np.array(expected), rel=1e-9)
    assert 0 < np.array(told).mean() < 1


def test_shares_are_worded_as_in_every_report() -> None:
    from mpinspect.reporting.words import percent

    shares = [0, 1e-9, 1e-5, 3.2e-4, 0.0099, 0.0123, 0.0999, 0.1, 0.4567, 0.994, 0.996, 0.9999, 0.99999, 1]
    assert in_node("console.log(JSON.stringify(given.map(percent)));", shares) == [percent(share) for share in shares]


def test_a_page_holds_the_data_of_the_session() -> None:
    report = analyse(sessions.everything())
    text = gzip.decompress(base64.b64decode(packed(report))).decode("utf-8")
    assert json.loads(text) == json.loads(json.dumps(data(report)))
    members = [group["size"] for group in data(report)["groups"]]
    assert sum(members) == len(data(report)["tensors"])


def test_a_page_opens_at_the_runs_own_scale() -> None:
    session = sessions.word_model()
    for scale, exponent in ((1024.0, 10), (1000.0, 9), (0.25, -2), (math.inf, 0), (None, 0)):
        progress = replace(session.progress, scales=(ScaleChange(0, scale),))
        assert data(analyse(replace(session, progress=progress)))["own"] == exponent


def test_the_page_of_a_failed_run_opens_at_the_scale_before_it_collapsed() -> None:
    session = sessions.word_model()
    falling = [(step, 2.0 ** (10 - step)) for step in range(40)]
    for scales, own, has_collapsed in (
        (falling, 10, True),
        ([(0, 2.0**16), (1, 2.0**8), (2, 2.0**12), (3, 2.0**4), (4, 2.0**-30)], 12, True),
        (falling[:8], 3, False),
    ):
        progress = replace(session.progress, scales=tuple(ScaleChange(*each) for each in scales))
        given = data(analyse(replace(session, progress=progress)))
        assert (given["own"], given["collapsed"]) == (own, has_collapsed)
    # Below 1 a scale has collapsed, too, where the forward itself was not finite.
    event = replace(eventful().events[0], step=3, phase="forward", skipped=True)
    progress = replace(session.progress, scales=tuple(ScaleChange(*each) for each in falling[:14]))
    assert data(analyse(replace(session, progress=progress, events=(event,))))["own"] == 10
    assert data(analyse(replace(session, progress=progress)))["own"] == -3


def test_a_page_opens_in_the_fp8_format_of_a_cast_of_gradients() -> None:
    session = replace(sessions.word_model(), precision=Precision({"float32": 100}))
    for phase, format, kind in (
        ("backward of Narrow", "float8_e5m2", "activation_gradient"),
        ("forward", "float16", ""),
    ):
        evidence = {"dtype": "float8_e5m2", "phase": phase, "line": "train.py:20", "operator": "_to_copy"}
        cast = Finding("operator-flushes", "error", "", "A cast flushes all values.", evidence, step=1)
        given = data(replace(analyse(session), findings=(cast,)))
        assert (given["format"], given["opening"]["kind"] or "") == (format, kind)


@pytest.mark.parametrize(
    ("computes", "judged", "opens"),
    [
        # FP32 loses nothing: its run opens with what FP16 would do to it.
        ("float32", None, "float16"),
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("float32", "float8_e4m3", "float8_e4m3"),
    ],
)
def test_a_page_opens_in_the_format_in_which_the_run_computes(computes: str, judged: str | None, opens: str) -> None:
    session = replace(sessions.word_model(), precision=Precision({computes: 100}, autocast=("",)))
    report = analysing.analyse(session, judged)
    given = data(report)
    assert given["format"] == opens
    # A scale is suggested for a format that needs one, never for one that does not.
    for format, advice in ((report.format, report.loss_scale), ("float16", report.in_float16)):
        if advice is not None and advice.needed:
            assert given["suggested"] == (format, math.log2(advice.recommended))
            break
    else:
        assert given["suggested"] is None


def test_a_page_allows_its_own_script_and_no_other() -> None:
    page = render(analyse(sessions.word_model()), ".html")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page
    # A link that a reader may follow is not a request; nothing else has an address.
    assert not re.search(r"""src=|@import|url\(|fetch\(|<(?!a )[^>]*href=""", page)
    assert page.count("data-widget=") == 1
    # Where scripts do not run the tables say it.
    assert "needs JavaScript; the tables have the same figures" in page


def test_other_forms_have_no_script() -> None:
    report = analyse(sessions.word_model())
    for text in (fragment(document(report)), render(report, ".md"), render(report, ".txt")):
        assert "script" not in text.lower()
        assert "The map" not in text
    assert "<script" not in render(analyse(Session()), ".html")


def test_names_are_never_markup() -> None:
    page = render(analyse(sessions.all_sessions()["hostile"]), ".html")
    (held,) = re.findall(r'data-widget="([^"]*)"', page)
    names = [tensor["name"] for tensor in json.loads(gzip.decompress(base64.b64decode(held)))["tensors"]]
    assert names
    assert all(name.isprintable() for name in names)


def eventful() -> Session:
    """Four blocks of 125 steps; the scale falls three times, once with an event whose layer stands in the map."""
    made = sessions.everything()
    windows = tuple(
        replace(window, first_step=125 * place, last_step=125 * place + 124, tensors=_louder(window.tensors, place))
        for place, window in enumerate(made.windows)
    )
    scales = ((0, 65536.0), (25, 32768.0), (260, 65536.0), (412, 32768.0), (413, 16384.0), (480, None))
    progress = replace(made.progress, scales=tuple(ScaleChange(*each) for each in scales), skipped_steps=3)
    return replace(made, windows=windows, progress=progress)


def _louder(tensors: Any, powers: int) -> Any:
    return {key: replace(tensor, histogram=tensor.histogram.shifted(powers)) for key, tensor in tensors.items()}


def test_a_page_holds_the_runs_history() -> None:
    session = eventful()
    report = analyse(session)
    given = json.loads(json.dumps(data(report)))
    assert given["scales"] == [[0, 16.0], [25, 15.0], [260, 16.0], [412, 15.0], [413, 14.0], [480, None]]
    assert (given["steps"], given["skipped"]) == (session.progress.steps, 3)
    advice = report.loss_scale
    assert [2.0**end for end in given["windows"]["float16"]] == [advice.lowest, advice.highest]
    assert [event["step"] for event in given["events"]] == [412, 413]
    assert given["events"][0]["words"] in render(report, ".txt", width=200)
    assert given["events"][0]["maxima"].endswith("oldest first: 0.12, 0.25, 0.5, 0.97")
    lost = given["lost"]["bfloat16"]
    assert lost["measured"]
    assert lost["tensors"] == {"decoder.3.attn.weight": [[995, 1000]] * 4}
    assert not given["lost"]["float16"]["measured"]
    counted = [key.name for key in session.totals() if key.kind == "update"]
    assert [each["name"] for each in given["updates"]] == counted
    assert counted


def test_every_fall_of_the_scale_lies_within_the_axes_also_that_after_the_last_skipped_step(show: Any) -> None:
    session = replace(
        broken(nan_from=99), precision=Precision(scalers=(ScalerRecord("GradScaler", backoff_factor=0.5),))
    )
    (event,) = session.events
    # The last step is skipped, so its fall acts after the end.
    skips = tuple(replace(event, step=step, skipped=True, loss_scale=2.0 ** (16 - step)) for step in range(5, 10))
    progress = replace(session.progress, scales=(ScaleChange(0, 2.0**11),), skipped_steps=5)
    report = analyse(replace(session, events=skips, progress=progress))
    assert [tuple(change) for change in data(report)["scales"]] == [
        (0, 11),
        *((step + 1, 15 - step) for step in range(5, 10)),
    ]
    page = show(report)
    axis = page.locator(".explorer .steps .axis").first.bounding_box()
    falls = [each.bounding_box() for each in page.locator(".explorer .steps svg .fall").all()]
    assert len(falls) == page.locator(".explorer .steps svg .event").count() == 5
    assert all(fall["y"] + fall["height"] <= axis["y"] + axis["height"] + 1 for fall in falls)
    line = page.locator(".explorer .steps .curve.scales").bounding_box()
    assert line["x"] + line["width"] == pytest.approx(axis["x"] + axis["width"], abs=2)


def test_a_curve_that_ends_before_the_axis_names_the_last_counted_step(show: Any) -> None:
    for steps, expected in ((10, False), (15, True)):
        session = broken(nan_from=99)
        session = replace(session, events=(), progress=replace(session.progress, steps=steps, scales=()))
        page = show(analyse(session))
        assert ("counted up to step 9" in page.text_content(".explorer figure.steps figcaption")) is expected


def test_a_window_that_is_none_is_not_shaded() -> None:
    assert data(analyse(SESSIONS["nan_everywhere"]))["windows"] == {}
    assert data(analyse(Session(windows=eventful().windows[:1], progress=Progress())))["scales"] == []


# -- in a browser --------------------------------------------------------------------------------------------------------


def shown(page: Any) -> dict[str, list[int]]:
    """The integers of each row, by its layer."""
    rows = page.eval_on_selector_all(
        ".explorer tbody tr[data-name]",
        "rows => rows.map(row => [row.dataset.name, ...['flushed', 'subnormal', 'low', 'high'].map(key => +row.dataset[key])])",
    )
    return {name: counts for name, *counts in rows}


def power(exponent: int) -> str:
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def expected(session: Session, kind: str, name: str, format: str, scale: int) -> list[int]:
    histogram = next(
        window.histogram for key, window in session.totals().items() if (key.name, key.kind) == (name, kind)
    ).shifted(scale)
    return [histogram.flushed(format), histogram.subnormal(format), *histogram.overflowed_bounds(format)]


def test_the_slider_and_the_switch(show: Any) -> None:
    session = sessions.word_model()
    page = show(analyse(session))
    page.click(".explorer thead th:first-child button")
    for format in FORMATS:
        page.select_option(".explorer select >> nth=1", format)
        for scale in (-8, 0, 12):
            page.locator(".explorer input[type=range]").first.fill(str(scale))
            for kind in ("weight_gradient", "activation_gradient"):
                page.select_option(".explorer select >> nth=0", kind)
                rows = shown(page)
                assert rows
                for name, counts in rows.items():
                    assert counts == expected(session, kind, name, format, scale), (name, format, scale)


def test_search_sort_keys_and_a_permalink(show: Any) -> None:
    report = analyse(sessions.word_model())
    page = show(report)
    page.fill(".explorer input[type=search]", "decoder")
    assert shown(page)
    assert all("decoder" in name for name in shown(page))
    page.fill(".explorer input[type=search]", "")
    page.click(".explorer thead button:text('flushed')")
    rows = page.eval_on_selector_all(
        ".explorer tbody tr[data-name]", "rows => rows.map(row => row.dataset.flushed / row.dataset.all)"
    )
    assert rows == sorted(rows, reverse=True)
    page.focus(".explorer .rows")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    chosen = page.get_attribute(".explorer tbody tr.chosen", "data-name")
    assert chosen == list(shown(page))[1]
    page.locator(".explorer input[type=range]").first.fill("12")
    address = page.evaluate("location.hash")
    again = show(report, address)
    assert again.get_attribute(".explorer tbody tr.chosen", "data-name") == chosen
    assert again.text_content(".explorer .detail h3") == chosen
    assert "at a loss scale of 2¹²" in again.text_content(".explorer .detail")


def test_the_step_slider_and_its_keys(show: Any) -> None:
    session = eventful()
    page = show(analyse(session), "#kind=activation_gradient&scale=3")
    scrubber = page.locator(".explorer figure.steps input[type=range]")
    assert scrubber.get_attribute("aria-valuetext") == "the whole run"
    assert page.is_hidden("text=show the whole run")
    for window in session.windows:
        scrubber.press("ArrowRight")
        assert scrubber.get_attribute("aria-valuetext") == f"steps {window.first_step} to {window.last_step}"
        for name, counts in shown(page).items():
            (histogram,) = (
                tensor.histogram.shifted(3)
                for key, tensor in window.tensors.items()
                if key == (name, "activation_gradient")
            )
            flushed, subnormal = histogram.flushed("float16"), histogram.subnormal("float16")
            assert counts == [flushed, subnormal, *histogram.overflowed_bounds("float16")], name
    # A place on the axis of steps is the block that holds it.
    scrubber.fill("130")
    assert "block=1" in page.evaluate("location.hash")
    page.click("text=show the whole run")
    assert "block" not in page.evaluate("location.hash")


def test_the_curves_and_the_events(show: Any) -> None:
    session = eventful()
    report = analyse(session)
    page = show(report, "#kind=activation_gradient")
    low, high = (int(math.log2(end)) for end in (report.loss_scale.lowest, report.loss_scale.highest))
    assert page.locator(".explorer .losses .curve").count() == 0
    page.click("text=show the curve")
    words = page.text_content(".explorer figure.losses figcaption")
    # Small elements are many: at the window's lower end more of them are flushed than of the magnitudes.
    flushed = max(
        layer.histogram.flushed_fraction("float16", low)
        for layer in report.layers
        if layer.kind == "activation_gradient" and layer.histogram is not None
    )
    assert f"safe window {power(low)} .. {power(high)}: flushes up to " in words
    (elements,) = re.findall(r"flushes up to (\S+) of the elements, \S+ of the magnitudes", words)
    assert elements == percent(flushed)
    assert "16384 (2¹⁴) (the run's, as last sampled)" in page.text_content(".explorer .said")
    assert page.locator(".explorer svg .window").count() == 1
    page.select_option(".explorer select >> nth=1", "float8_e4m3")
    assert "no safe window is known for" in page.text_content(".explorer figure.losses figcaption")
    assert page.locator(".explorer svg .window").count() == 0
    assert page.locator(".explorer svg .fall").count() == 3
    assert page.locator(".explorer svg .event").count() == len(session.events)
    assert "3 updates skipped" in page.text_content(".explorer figure.steps figcaption")
    # An event leads to its step and its layer, which lies in another kind's table.
    page.select_option(".explorer select >> nth=0", "weight_gradient")
    page.click(".explorer .events summary")
    page.click(".explorer .events button >> nth=0")
    assert page.get_attribute(".explorer tbody tr.chosen", "data-name") == "decoder.3.attn"
    assert "steps 375 to 499" in page.text_content(".explorer .said")
    # The share at each scale is that of the layer: the curve's path has a point for each of them.
    key = next(key for key in session.totals() if key.name == "decoder.3.attn" and key.kind == "activation_gradient")
    histogram = session.windows[3].tensors[key].histogram
    page.select_option(".explorer select >> nth=1", "float16")
    drawn = re.findall(r"[ML]-?[\d.]+ ([\d.]+)", page.get_attribute(".explorer svg .flushes", "d"))
    expected = [histogram.shifted(k).flushed("float16") / histogram.nonzero for k in range(-24, 41)]
    top, bottom = min(map(float, drawn)), max(map(float, drawn))
    assert [(bottom - float(y)) / (bottom - top) for y in drawn] == pytest.approx(expected, abs=0.002)
    page.select_option(".explorer select >> nth=0", "weight")
    # No loss scale multiplies weights.
    assert page.is_hidden(".explorer .scale")
    assert page.locator(".explorer .losses .grip").count() == 0
    page.click(".explorer tbody tr")
    assert "Stored in BF16, 99.5% of its updates were lost" in page.text_content(".explorer .detail")


def test_an_event_whose_step_was_not_counted_says_so(show: Any) -> None:
    session = eventful()
    sparse = tuple(
        replace(window, last_step=window.first_step + 9, sampled_steps=10 if place else 4)
        for place, window in enumerate(session.windows)
    )
    # Events in one place would share an entry.
    events = tuple(
        replace(session.events[0], step=step, value=value) for step, value in ((5, "inf"), (130, "nan"), (300, "inf"))
    )
    page = show(analyse(replace(session, windows=sparse, events=events)))
    scrubber = page.locator(".explorer figure.steps input[type=range]")
    for place, (event, words) in enumerate(
        zip(
            events,
            (
                "The event is in step 5; 4 of steps 0 to 9 were counted, perhaps without it.",
                "",
                "The event is in step 300; it was not counted; the nearest counted: steps 250 to 259.",
            ),
            strict=True,
        )
    ):
        page.click(".explorer .events summary")
        page.click(f".explorer .events button >> nth={place}")
        # The list closes, so that it does not cover the map.
        assert page.get_attribute(".explorer .events", "open") is None
        assert scrubber.input_value() == str(event.step)
        said = page.text_content(".explorer .said")
        assert said.endswith(words or "1 holds infinities or NaNs.")
        assert (" in finite values, " in said) == ("1 holds infinities or NaNs" in said)
        assert ("event" in said) == bool(words)
    page.click("text=show the whole run")
    assert "event" not in page.text_content(".explorer .said")


def test_where_nothing_finite_was_counted_losses_are_unknown(show: Any) -> None:
    page = show(analyse(SESSIONS["nan_everywhere"]))
    assert "no finite non-zero element" in page.text_content(".explorer .said")
    assert "1 holds infinities or NaNs" in page.text_content(".explorer .said")
    page.click(".explorer tbody tr[data-name]")
    assert "no finite non-zero element" in page.text_content(".explorer .detail")
    assert page.locator(".explorer svg .curve.flushes").count() == 0
    assert "no finite non-zero value was counted" in page.text_content(".explorer figure.losses .readout")
    page.click("text=show the curve")
    assert "no finite non-zero element was counted" in page.text_content(".explorer figure.losses svg text.none")


def test_a_layer_in_a_closed_group_is_found(show: Any) -> None:
    report = analyse(SESSIONS["layers_300"])
    name = "encoder.layers.120.attention.output.weight"
    page = show(report, f"#kind=weight_gradient&layer={name}", reduced_motion="reduce")
    chosen = page.locator(".explorer tbody tr.chosen")
    assert chosen.get_attribute("data-name") == name
    inside = "row => { const [one, all] = [row, row.closest('.rows')].map(each => each.getBoundingClientRect());"
    assert chosen.evaluate(f"{inside} return one.top >= all.top && one.bottom <= all.bottom; }}")
    # On paper all rows stand, and nothing moves by itself.
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".explorer tbody tr[data-name]").count() == 151
    assert page.evaluate("document.getAnimations().length") == 0


def test_notes_on_modules_are_next_to_their_layers(show: Any, tmp_path: Path) -> None:
    session = sessions.word_model()
    watched = tuple(replace(info, module=info.name.removesuffix(".weight")) for info in session.watched)
    hostile = "<img src=x onerror=alert(1)>"
    notes = ModuleNotes(
        (("shapes", "meaning"), (hostile, "")),
        {
            "hidden": (NoteCell("off", "error", 4.0), NoteCell("9%", "", 0.09)),
            "decoder": (NoteCell("native"), NoteCell("80%", "", 0.8)),
        },
        {"hidden": ("Product: 3 x 5 x 7", hostile)},
    )
    path = tmp_path / "a.html"
    path.write_text(html.render(document(analyse(replace(session, watched=watched)), notes=notes)), "utf-8")
    page = show(path, "#kind=weight_gradient&layer=hidden.weight")
    assert page.text_content(".explorer .detail ul:not(.plain)") == f"Product: 3 x 5 x 7{hostile}"
    cells = ".explorer tr.chosen td >> nth="
    assert [page.text_content(f"{cells}{place}") for place in (-2, -1)] == ["off", "9%"]
    page.click(f".explorer thead button:text('{hostile}')")
    assert next(iter(shown(page))) == "decoder.weight"


def two_models() -> tuple[dict[str, Session], RunReport]:
    sessions_by_name = {"rank0/Net": sessions.word_model(), "<b>Critic": SESSIONS["right_to_left"]}
    parts = tuple(ModelPart(name, analyse(session)) for name, session in sessions_by_name.items())
    return sessions_by_name, RunReport("gan.py", "ended", parts)


def test_of_several_models_one_map_has_a_switch(show: Any) -> None:
    by_name, report = two_models()
    page = show(report)
    assert page.locator("[data-widget]").count() == 1
    assert page.locator(".explorer .rows").count() == 1
    names = page.locator("[data-widget] select").first.locator("option").all_text_contents()
    assert names == [*by_name, "all together"]
    page.locator(".explorer input[type=range]").first.fill("12")
    page.select_option("[data-widget] select >> nth=0", label="<b>Critic")
    page.wait_for_selector("tr[data-name='שכבה.1.weight']")
    # The choices made for one model apply to the other too, and the address leads to the current one.
    session = by_name["<b>Critic"]
    assert shown(page)["שכבה.1.weight"] == expected(session, "weight_gradient", "שכבה.1.weight", "float16", 12)
    address = page.evaluate("location.hash")
    assert "model=%3Cb%3ECritic" in address
    assert shown(show(report, address)) == shown(page)


def test_the_maps_of_all_models_move_together(show: Any) -> None:
    by_name, report = two_models()
    page = show(report)
    page.select_option("[data-widget] select >> nth=0", "all")
    page.wait_for_selector(".explorer .rows >> nth=1")
    page.locator(".explorer input[type=range]").first.fill("9")
    page.wait_for_selector(".explorer output:text('2⁹') >> nth=1")
    page.locator(".explorer .rows").last.scroll_into_view_if_needed()
    page.wait_for_selector("tr[data-name='שכבה.1.weight']")
    rows = shown(page)
    assert rows["שכבה.1.weight"] == expected(by_name["<b>Critic"], "weight_gradient", "שכבה.1.weight", "float16", 9)
    show(report, page.evaluate("location.hash"), awaited=".explorer .rows >> nth=1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_everyone_can_read_it(scheme: str, width: int, axe: str, show: Any) -> None:
    report = analyse(eventful())
    viewport = {"width": width, "height": 800}
    page = show(report, "#layer=decoder.3.attn&block=1", color_scheme=scheme, viewport=viewport)
    page.click(".explorer .events summary")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    assert len(found["passes"]) > 10


def test_without_scripts_the_tables_are_shown(show: Any) -> None:
    page = show(analyse(sessions.word_model()), awaited="", java_script_enabled=False)
    assert "the tables have the same figures" in page.text_content("[data-widget]")
    assert page.is_visible("table")


@pytest.mark.parametrize("name", SESSIONS)
def test_every_session_opens(name: str, show: Any) -> None:
    session = SESSIONS[name]
    report = analyse(session)
    if not data(replace(report))["tensors"]:
        return
    page = show(report, viewport={"width": 390, "height": 800})
    assert page.text_content(".explorer .said")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_event_whose_maxima_are_not_finite_is_on_the_page():
    """A damaged file may claim them, and JSON has neither."""
    session = sessions.everything()
    event = replace(session.events[0], last_maxima=(math.inf, math.nan, 0.5))
    report = analyse(replace(session, events=(event,)))
    assert data(report)["events"][0]["maxima"].endswith("oldest first: inf, nan, 0.5")
    assert packed(report)


def computing_in(dtype: str) -> Session:
    return replace(sessions.word_model(), precision=Precision({"float32": 100}, autocast=(dtype,)))


def test_maps_that_are_compared_open_in_the_narrowest_of_their_formats(show: Any) -> None:
    reports = [analysing.analyse(computing_in(dtype)) for dtype in ("", "bfloat16", "float16")]
    for places, narrowest in (((1, 1), "bfloat16"), ((1, 0), "float16"), ((1, 0, 2), "float16")):
        parts = tuple(ModelPart(str(number), reports[place]) for number, place in enumerate(places))
        page = show(RunReport("a.py", "ended", parts), "#model=0")
        assert page.input_value(".explorer .explorer select >> nth=2") == "bfloat16"
        page.select_option("[data-widget] select >> nth=0", "all")
        page.wait_for_selector(f".explorer .rows >> nth={len(places) - 1}")
        shown = page.locator(".explorer .explorer").all()
        assert [map.locator("select").nth(1).input_value() for map in shown] == [narrowest] * len(places)
