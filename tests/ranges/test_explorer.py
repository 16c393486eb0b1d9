"""The map of the page: what its script works out is what Python does, and a browser shows it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import sessions
from agreeing_reports import analyse

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.report.explorer import data, packed
from mpinspect.ranges.session import ScaleChange, Session
from mpinspect.reporting.forms import document, render
from mpinspect.reporting.html import fragment

SCRIPT = resources.files("mpinspect.ranges.report").joinpath("explorer.js").read_text("utf-8")
NODE = shutil.which("node")
SESSIONS = {name: session for name, session in sessions.all_sessions().items() if session.windows}
SCALES = (-130, -24, -9, -8, -1, 0, 1, 7, 12, 13, 16, 24, 31, 40, 150)


def in_node(driver: str, given: Any) -> Any:
    """Run the script's functions under Node; what the driver returns as JSON."""
    if NODE is None:
        pytest.skip("needs Node.js, which is not installed")
    code = f"{SCRIPT}\nconst given = JSON.parse(await new Response(process.stdin).text());\n{driver}"
    ended = subprocess.run(
        [NODE, "--input-type=module", "--eval", code], input=json.dumps(given), capture_output=True, text=True
    )
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


def test_shares_are_worded_as_in_every_report() -> None:
    from mpinspect.reporting.words import percent

    shares = [0, 1e-9, 1e-5, 3.2e-4, 0.0099, 0.0123, 0.0999, 0.1, 0.4567, 0.994, 0.996, 0.9999, 0.99999, 1]
    assert in_node("console.log(JSON.stringify(given.map(percent)));", shares) == [percent(share) for share in shares]


def test_what_a_page_holds_is_what_the_session_holds() -> None:
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


def test_a_page_allows_its_own_script_and_no_other() -> None:
    page = render(analyse(sessions.word_model()), ".html")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page
    assert not re.search(r"""(src|href)=|@import|url\(|fetch\(""", page)
    assert page.count("data-widget=") == 1
    # Where scripts do not run the tables say it.
    assert "needs JavaScript; the tables below say the same" in page


def test_other_forms_have_no_script() -> None:
    report = analyse(sessions.word_model())
    for text in (fragment(document(report)), render(report, ".md"), render(report, ".txt")):
        assert "script" not in text.lower()
        assert "The map" not in text
    assert "<script" not in render(analyse(Session()), ".html")


def test_names_stand_in_no_markup() -> None:
    page = render(analyse(sessions.all_sessions()["hostile"]), ".html")
    (held,) = re.findall(r'data-widget="([^"]*)"', page)
    names = [tensor["name"] for tensor in json.loads(gzip.decompress(base64.b64decode(held)))["tensors"]]
    assert names
    assert all(name.isprintable() for name in names)


# -- in a browser --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Any:
    """Chromium without a network; what it prints, and asks for, is an error."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mpinspect[browser]'")
    program = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium, which is not installed")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=options)
        yield running
        running.close()


def opened(browser: Any, path: Path, address: str = "", **options: Any) -> Any:
    """The page, whose messages and requests are kept in ``page.troubles``."""
    page = browser.new_context(offline=True, **options).new_page()
    page.troubles = []
    page.on("console", lambda message: page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda request: page.troubles.extend([] if request.url.startswith("file:") else [request.url]))
    page.goto(f"file://{path}{address}")
    page.wait_for_selector(".explorer tbody tr[data-name]")
    return page


def shown(page: Any) -> dict[str, list[int]]:
    """The integers of each row, by its layer."""
    rows = page.eval_on_selector_all(
        ".explorer tbody tr[data-name]",
        "rows => rows.map(row => [row.dataset.name, ...['flushed', 'subnormal', 'low', 'high'].map(key => +row.dataset[key])])",
    )
    return {name: counts for name, *counts in rows}


def expected(session: Session, kind: str, name: str, format: str, scale: int) -> list[int]:
    histogram = next(
        window.histogram for key, window in session.totals().items() if (key.name, key.kind) == (name, kind)
    ).shifted(scale)
    return [histogram.flushed(format), histogram.subnormal(format), *histogram.overflowed_bounds(format)]


def test_the_slider_and_the_switch(browser: Any, tmp_path: Path) -> None:
    session = sessions.word_model()
    page = opened(browser, analyse(session).save(tmp_path / "a.html"))
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
    assert page.troubles == []


def test_search_sort_keys_and_a_permalink(browser: Any, tmp_path: Path) -> None:
    path = analyse(sessions.word_model()).save(tmp_path / "a.html")
    page = opened(browser, path)
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
    again = opened(browser, path, address)
    assert again.get_attribute(".explorer tbody tr.chosen", "data-name") == chosen
    assert again.text_content(".explorer .detail h4") == chosen
    assert "at a loss scale of 2^12" in again.text_content(".explorer .detail")
    assert page.troubles == again.troubles == []


def test_without_scripts_the_tables_stand(browser: Any, tmp_path: Path) -> None:
    page = browser.new_context(java_script_enabled=False, offline=True).new_page()
    page.goto(f"file://{analyse(sessions.word_model()).save(tmp_path / 'a.html')}")
    assert "the tables below say the same" in page.text_content("[data-widget]")
    assert page.is_visible("table")


@pytest.mark.parametrize("name", SESSIONS)
def test_every_session_opens(name: str, browser: Any, tmp_path: Path) -> None:
    session = SESSIONS[name]
    report = analyse(session)
    if not data(replace(report))["tensors"]:
        return
    page = opened(browser, report.save(tmp_path / "a.html"), viewport={"width": 390, "height": 800})
    assert page.text_content(".explorer .said")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.troubles == []
