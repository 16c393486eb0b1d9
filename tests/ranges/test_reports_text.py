"""The text report: golden files, and what it must say."""

from __future__ import annotations

import dataclasses

import pytest
import sessions

from mpinspect.ranges.analysis.report import TimeBlock
from mpinspect.reporting import forms, html
from mpinspect.reporting.document import static
from mpinspect.reporting.words import percent, with_power


def render(report, width=None):
    return forms.render(report, ".txt", width=width)


@pytest.mark.parametrize("width", [60, 100, 140])
@pytest.mark.parametrize("name", ["everything", "word_model", "empty", "hostile"])
def test_golden(name, width, golden):
    report = sessions.report_by_hand(sessions.all_sessions()[name])
    golden(f"text_{name}_{width}.txt", render(report, width))


@pytest.mark.parametrize("name", ["everything", "hostile"])
def test_golden_html(name, golden):
    """Without the map, whose script and counts are tested in a browser."""
    report = sessions.report_by_hand(sessions.all_sessions()[name])
    golden(f"{name}.html", html.render(static(forms.document(report))))


def test_the_first_event_comes_before_everything_else():
    rendered = render(sessions.report_by_hand(sessions.everything()), 200)
    event = rendered.index("step 412, micro-batch 1, backward, 'decoder.3.attn': inf in the activation gradient")
    assert event < rendered.index("Suggested loss scale")
    for fact in ("loss scale 65536 (2^16)", "forward was finite", "step was skipped", "0.12, 0.25, 0.5, 0.97"):
        assert fact in rendered


def test_the_loss_scale_and_its_window():
    rendered = render(sessions.report_by_hand(sessions.word_model()), 200)
    assert "Suggested loss scale: 8192 (2^13); window 2^7 .. 2^20; headroom 7 powers of two" in rendered


def test_doubt_no_need_and_no_advice_are_three_things():
    report = sessions.report_by_hand(sessions.word_model())

    def heading(**changes):
        advice = dataclasses.replace(report.loss_scale, **changes)
        return render(dataclasses.replace(report, loss_scale=advice), 200)

    assert "Scale 1 will do; window" in heading(needed=False, recommended=1.0)
    assert "8192 (2^13) (if one is needed)" in heading(needed=None)
    assert "no scale serves all: at least 2^30 is needed, 2^20 the largest" in heading(lowest=2.0**30)
    none = render(dataclasses.replace(report, loss_scale=sessions.no_advice("Because.")), 200)
    assert "No loss scale can be suggested.\n  Because." in none
    assert "Suggested" not in none


def test_measured_estimated_and_unknown_look_different():
    report = sessions.report_by_hand(sessions.everything())
    line = next(line for line in render(report, 140).splitlines() if line.startswith("decoder  "))
    # Measured bare, the estimate with a mark and its bounds.
    assert " 82% " in line
    assert "~11% [5.9%..20%]" in line
    unknown = dataclasses.replace(report.layers[0], name="mystery", flushed_fraction=None, lost_l1_share=None)
    changed = dataclasses.replace(report, layers=(unknown,))
    line = next(line for line in render(changed, 140).splitlines() if line.startswith("mystery"))
    assert line.split()[2:5] == ["?", "?", "?"]


def test_of_many_layers_the_worst_are_shown_and_the_rest_counted():
    report = sessions.report_by_hand(sessions.all_sessions()["layers_300"])
    rendered = render(report, 120)
    assert "encoder.layers.{0..149}.attention.output" in rendered
    assert "encoder.layers.0.attention" not in rendered
    alone = dataclasses.replace(
        report,
        layers=tuple(
            dataclasses.replace(layer, name=f"n{place}", module=f"n{place}")
            for place, layer in enumerate(report.layers)
        ),
    )
    assert f"... and {len(report.layers) - 8} more (--all, JSON)" in render(alone, 120)


def test_layers_that_never_fired_are_named_with_the_reason():
    rendered = render(sessions.report_by_hand(sessions.everything()), 200)
    assert "no weight gradient (frozen: requires_grad is False): spare.weight" in rendered
    assert "tower.11.weight and 18 more" in rendered


def test_html_escapes_what_it_shows():
    page = forms.render(sessions.report_by_hand(sessions.all_sessions()["hostile"]), ".html")
    assert page.count("<script") == page.count('<script type="module">') == 1
    assert "&lt;script&gt;" in page
    assert "[red]not red" in page


def test_plain_text_is_ascii_but_for_names():
    render(sessions.report_by_hand(sessions.everything()), 140).encode("ascii")


def test_the_terminal_sets_the_width(monkeypatch):
    report = sessions.report_by_hand(sessions.everything())
    monkeypatch.setenv("COLUMNS", "72")
    assert render(report) == render(report, 72)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0, "0%"),
        (1, "100%"),
        (1e-9, "<0.001%"),
        (0.00012, "0.012%"),
        (0.87, "87%"),
        (0.9999, "99.99%"),
        (1 - 1e-9, ">99.99%"),
    ],
)
def test_a_share_is_never_rounded_to_none_or_all(share, words):
    assert percent(share) == words


@pytest.mark.parametrize(
    ("scale", "words"),
    [(8192.0, "8192 (2^13)"), (1.0, "1 (2^0)"), (0.125, "2^-3"), (2.0**40, "2^40"), (1000.0, "1000"), (None, "?")],
)
def test_a_scale_in_words(scale, words):
    assert with_power(scale) == words


def test_backwards_are_said_where_there_is_not_one_a_step():
    progress = sessions.everything().progress
    for backwards, words in ((500, "40 sampled, 2 skipped;"), (2000, "40 sampled, 2 skipped, 2,000 backwards;")):
        progress = dataclasses.replace(progress, backwards=backwards)
        rendered = render(sessions.report_by_hand(dataclasses.replace(sessions.everything(), progress=progress)), 200)
        assert words in rendered


def test_a_window_that_moves_by_one_power_is_noise():
    report = sessions.report_by_hand(sessions.word_model())

    def moving(*highest):
        blocks = tuple(TimeBlock(step, step, 3, high) for step, high in enumerate(highest))
        return render(
            dataclasses.replace(report, loss_scale=dataclasses.replace(report.loss_scale, blocks=blocks)), 200
        )

    assert "over time" not in moving(18, 19, 18)
    assert "The window over time, by the sampled steps: step 0: 2^3 .. 2^18; step 1: 2^3 .. 2^20" in moving(18, 20)
    # Neighbours that have the same window are one.
    assert "sampled steps: steps 0-1: 2^3 .. 2^18; steps 2-4: 2^3 .. 2^21; step 5: 2^3 .. 2^18" in moving(
        18, 18, 21, 21, 21, 18
    )
