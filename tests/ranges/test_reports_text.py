"""The text report: golden files, and the required sentences."""

import dataclasses

import numpy as np
import pytest
import sessions

import mpinspect
from mpinspect.numeric.exponents import Interval
from mpinspect.ranges.analysis.report import TimeBlock
from mpinspect.ranges.kinds import UPDATE
from mpinspect.ranges.report.layers import badness, flushed_words
from mpinspect.ranges.report.scale_line import steps_and_samples
from mpinspect.ranges.session import Progress
from mpinspect.ranges.windows.tensors import LostUpdates
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting import forms, html
from mpinspect.reporting.document import static
from mpinspect.reporting.finding import Finding
from mpinspect.reporting.words import filled, number_of, optional, percent, share, with_power


def render(report, width=None):
    return forms.render(report, ".txt", width=width)


@pytest.mark.parametrize("width", [60, 100, 140])
@pytest.mark.parametrize("name", ["everything", "word_model", "empty", "hostile"])
def test_the_text_report_matches_its_golden_file(name, width, golden):
    report = sessions.report_by_hand(sessions.all_sessions()[name])
    golden(f"text_{name}_{width}.txt", render(report, width))


@pytest.mark.parametrize("name", ["everything", "hostile"])
def test_the_html_report_matches_its_golden_file(name, golden):
    """The map is left out; its script and counts are tested in a browser."""
    report = sessions.report_by_hand(sessions.all_sessions()[name])
    golden(f"{name}.html", html.render(static(forms.document(report))))


def test_half_the_smallest_subnormal_is_drawn_as_flushed():
    values = np.array([2.0**-25] * 10 + [1.5 * 2.0**-25] * 20 + [2.0**-3] * 70, np.float32)
    with mpinspect.Recorder() as recorder:
        recorder.observe("w", values, step=0)
    (drawn,) = [line for line in render(recorder.report(), 200).splitlines() if line.startswith("w ")]
    assert " 10% " in drawn
    below, inside = drawn.split("|")[:2]
    assert below.endswith("#")
    assert inside.strip().count("#") == 2


def test_uncertain_unneeded_and_missing_scales_have_different_sentences():
    report = sessions.report_by_hand(sessions.word_model())

    def heading(**changes):
        advice = dataclasses.replace(report.loss_scale, **changes)
        return render(dataclasses.replace(report, loss_scale=advice), 200)

    assert "Scale 1 will do; window" in heading(needed=False, recommended=1.0)
    assert "8192 (2^13) (if one is needed)" in heading(needed=None)
    assert "no scale serves all: at least 2^30 is needed, 2^20 the largest" in heading(lowest=2.0**30)
    none = render(dataclasses.replace(report, loss_scale=sessions.no_advice("Because.")), 200)
    assert "No window of loss scales can be given.\n  Because." in none
    assert "Suggested" not in none


def test_measured_estimated_and_unknown_shares_look_different():
    report = sessions.report_by_hand(sessions.everything())
    line = next(line for line in render(report, 140).splitlines() if line.startswith("decoder  "))
    # The measured share has no mark; the estimate has a mark and bounds.
    assert " 82% " in line
    assert "~11% [5.9%..20%]" in line
    unknown = dataclasses.replace(report.layers[0], name="mystery", flushed_fraction=None, lost_l1_share=None)
    changed = dataclasses.replace(report, layers=(unknown,))
    line = next(line for line in render(changed, 140).splitlines() if line.startswith("mystery"))
    assert line.split()[2:5] == ["?", "?", "?"]


def test_the_worst_of_many_layers_are_shown_and_the_rest_counted():
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
    [(8192.0, "8192 (2^13)"), (1.0, "1"), (0.125, "2^-3"), (2.0**40, "2^40"), (1000.0, "1000"), (None, "?")],
)
def test_a_scale_is_written_with_its_power_of_two(scale, words):
    assert with_power(scale) == words


@pytest.mark.parametrize(
    ("number", "thing", "words"),
    [(1, "batch", "1 batch"), (2, "batch", "2 batches"), (1000, "step", "1,000 steps"), (0, "power", "0 powers")],
)
def test_a_number_of_things_has_its_plural(number, thing, words):
    assert number_of(number, thing) == words


def test_a_missing_figure_has_a_mark_and_a_missing_clause_is_empty():
    assert [optional(0, "2^{}".format), optional(None, "2^{}".format), optional(None, percent, "?")] == [
        "2^0",
        "-",
        "?",
    ]
    assert [filled(" on rank {}", 0), filled(" on rank {}", None), filled(" of {}", "")] == [" on rank 0", "", ""]


def test_the_number_of_backwards_is_shown_if_it_differs_from_the_steps():
    progress = sessions.everything().progress
    for backwards, words in (
        (500, "40 of them sampled, 2 updates skipped;"),
        (2000, "40 of them sampled, 2 updates skipped, 2,000 backwards;"),
    ):
        progress = dataclasses.replace(progress, backwards=backwards)
        rendered = render(sessions.report_by_hand(dataclasses.replace(sessions.everything(), progress=progress)), 200)
        assert words in rendered


@pytest.mark.parametrize(
    ("gradients", "backwards", "words"),
    [
        ({"float16": 10}, 5 * 500, "the sum of 5 in an FP16 .grad may be up to 3 powers of two larger"),
        ({"bfloat16": 10}, 512 * 500, "the sum of 512 in an FP16 .grad may be up to 9 powers of two larger"),
        ({"float32": 10}, 512 * 500, ""),
        ({"float16": 10}, 500, ""),
        # The last step is incomplete.
        ({"float16": 10}, 501, ""),
    ],
)
def test_the_window_mentions_sums_over_accumulated_backwards(gradients, backwards, words):
    session = sessions.everything()
    assert session.progress.steps == 500
    session = dataclasses.replace(
        session,
        progress=dataclasses.replace(session.progress, backwards=backwards),
        precision=dataclasses.replace(session.precision, weights=gradients, gradients={}),
    )
    rendered = render(sessions.report_by_hand(session), 200)
    assert words in rendered
    assert ("The window is of single backwards" in rendered) is bool(words)


def test_blocks_with_unsampled_steps_show_the_number_of_samples():
    report = sessions.report_by_hand(sessions.word_model())
    blocks = (TimeBlock(0, 0, 3, 18), TimeBlock(1, 500, 3, 21))
    windows = (Window(0, 0, 1, {}), Window(1, 1, 1, {}), Window(500, 500, 1, {}))
    report = dataclasses.replace(
        report,
        loss_scale=dataclasses.replace(report.loss_scale, blocks=blocks),
        session=dataclasses.replace(report.session, windows=windows),
    )
    assert "step 0: 2^3 .. 2^18; steps 1-500 (2 sampled): 2^3 .. 2^21" in render(report, 200)


def test_a_window_that_moves_by_one_power_of_two_is_not_listed_over_time():
    report = sessions.report_by_hand(sessions.word_model())

    def moving(*highest):
        blocks = tuple(TimeBlock(step, step, 3, high) for step, high in enumerate(highest))
        return render(
            dataclasses.replace(report, loss_scale=dataclasses.replace(report.loss_scale, blocks=blocks)), 200
        )

    assert "over time" not in moving(18, 19, 18)
    assert (
        "The window over time, the narrowest within each span of sampled steps: step 0: 2^3 .. 2^18; step 1: 2^3 .. 2^20"
        in moving(18, 20)
    )
    # Neighbouring blocks with the same window are merged.
    assert "sampled steps: steps 0-1: 2^3 .. 2^18; steps 2-4: 2^3 .. 2^21; step 5: 2^3 .. 2^18" in moving(
        18, 18, 21, 21, 21, 18
    )


@pytest.mark.parametrize(
    ("estimate", "low", "high", "words"),
    [
        (0.0, 0.0, 0.0, "0%"),
        (0.25, 0.25, 0.25, "25%"),
        # No flushed value was counted: the upper bound is shown, unless it is negligible or 100%.
        (0.0, 0.0, 0.0009, "<0.1%"),
        (1e-7, 1e-8, 3e-7, "<0.1%"),
        (0.0, 0.0, 0.008, "<=0.8%"),
        (0.0, 0.0, 0.71, "<=71%"),
        (0.0, 0.0, 1.0, "?"),
        # The estimate is the lower bound.
        (0.05, 0.05, 0.055, "~5%"),
        (0.05, 0.05, 0.35, "5%..35%"),
        (0.098, 0.06, 0.12, "~9.8%"),
        (0.098, 0.025, 0.35, "~9.8% [2.5%..35%]"),
        (2e-6, 0.0, 2e-6, "~<0.001%"),
    ],
)
def test_a_share_is_written_with_its_uncertainty(estimate, low, high, words):
    assert share(Interval(estimate, low, high), is_estimate=True) == words


def test_shares_of_elements_with_a_negligible_sum_have_no_bounds():
    layer = sessions.report_by_hand(sessions.everything()).layers[0]

    def words(estimate, low, high, lost):
        changed = dataclasses.replace(layer, lost_l1_share=Interval(0.0, 0.0, lost))
        return flushed_words(changed, Interval(estimate, low, high))

    assert words(0.0, 0.0, 0.7, 0.0005) == "0%"
    assert words(0.05, 0.05, 0.7, 0.0005) == "~5%"
    assert words(0.0, 0.0, 0.7, 0.005) == "<=70%"
    assert words(0.05, 0.02, 0.7, 0.005) == "~5%"
    assert words(0.05, 0.02, 0.7, 0.05) == "~5% [2%..70%]"


def test_rows_named_by_findings_or_nearest_to_overflow_have_priority():
    report = sessions.report_by_hand(sessions.all_sessions()["layers_300"])
    layers = [
        dataclasses.replace(layer, name=f"n{place}", module=f"n{place}") for place, layer in enumerate(report.layers)
    ]
    mild, mildest = sorted(range(len(layers)), key=lambda place: badness(layers[place]))[1::-1]
    layers[mild] = dataclasses.replace(layers[mild], range_offset=0)

    def shows(place, *findings):
        shown = render(dataclasses.replace(report, layers=tuple(layers), findings=findings), 120)
        return any(line.split()[:1] == [f"n{place}"] for line in shown.splitlines())

    assert shows(mild)
    assert not shows(mildest)
    assert shows(mildest, Finding("updates-lost", "info", f"n{mildest}", "It is lost.", {}))
    assert shows(mildest, Finding("updates-lost", "info", "", f"Lost in 'n0' and 'n{mildest}'.", {}))


def test_updates_without_losses_have_no_table():
    report = sessions.report_by_hand(sessions.everything())
    title = "Updates that rounding loses"
    assert title in render(report, 120)
    none = {"float16": LostUpdates(0, 0, True)}
    layers = tuple(
        dataclasses.replace(layer, lost_updates=none if layer.kind == UPDATE else None) for layer in report.layers
    )
    shown = render(dataclasses.replace(report, layers=layers), 120)
    assert title not in shown
    assert "Updates have no table" in shown


def test_an_incomplete_step_is_counted_as_begun():
    assert steps_and_samples(Progress(steps=0, sampled_steps=1)) == "0 steps, 1 begun and sampled"
    assert steps_and_samples(Progress(steps=1, sampled_steps=1)) == "1 step, 1 sampled"
