"""The decision on the loss scale uses the run's overflows and weighted samples, and all sentences on it agree."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from agreeing_reports import analyse, contradictions
from analysis_sessions import activation, session_of, spread, weight, window_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from mpinspect import Inspector, MpinspectWarning
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import FLOAT16, is_power_of_two
from mpinspect.ranges.analysis.overflow_odds import Ceiling, log2_highest, tolerance_factor
from mpinspect.ranges.report.layers import flushed_at_recommended, log2_recommended, range_strip
from mpinspect.ranges.session import Event, Progress, ScaleChange, Session
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.forms import render

LARGE = spread({-20: 1000, -6: 10})


def finding(report, id):
    return next((found for found in report.findings if found.id == id), None)


def overflow(step, scale, **others):
    fields = {"value": "inf", "skipped": True, "forward_finite": True, "phase": "backward", **others}
    phase = fields.pop("phase")
    value = fields.pop("value")
    return Event(step, 0, phase, "fc", "activation_gradient", "fc", value, loss_scale=scale, **fields)


def run_with(*events, tensors=None, steps=200, **others):
    """Return a session that sampled every tenth step, but not the steps of the events."""
    progress = Progress(steps, 20, sum(bool(event.skipped) for event in events), steps, True, **others)
    session = session_of(tensors or {activation("fc"): LARGE}, steps=20, progress=progress, events=tuple(events))
    return replace(session, windows=tuple(replace(window, last_step=steps - 1) for window in session.windows))


# -- the run's own overflows bound the window -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**13, 0.125, 1000.0, 1.0])
def test_the_window_ends_below_a_scale_at_which_the_run_overflowed(scale):
    report = analyse(run_with(*(overflow(7 + 10 * i, scale) for i in range(6))))
    assert report.loss_scale.highest < scale
    assert report.loss_scale.recommended < scale
    assert report.loss_scale.highest == 2.0 ** (math.ceil(math.log2(scale)) - 1)
    assert f"The run overflowed at 2^{math.ceil(math.log2(scale))}" in report.loss_scale.reason


def test_the_lowest_overflowed_scale_bounds_the_window():
    events = [overflow(5, 2.0**16), overflow(6, 2.0**15), overflow(150, 2.0**17)]
    assert analyse(run_with(*events)).loss_scale.highest == 2.0**14


@pytest.mark.parametrize(
    "fields",
    [
        {"forward_finite": False},
        {"phase": "forward", "forward_finite": False, "value": "nan"},
        {"value": "nan", "last_maxima": (0.5, 2.0)},
    ],
)
def test_events_that_no_scale_caused_do_not_bound_the_window(fields):
    """The events are a non-finite forward, and a NaN in a tensor whose values were far below FP16's maximum."""
    clean = analyse(run_with()).loss_scale
    assert analyse(run_with(overflow(7, 4.0, **fields))).loss_scale.highest == clean.highest


def test_a_nan_near_the_maximum_counts_as_an_overflow():
    event = overflow(7, 4.0, value="nan", last_maxima=(2.0**13, 2.0**14))
    assert analyse(run_with(event)).loss_scale.highest == 2.0


def test_an_overflow_in_fp16_does_not_bound_the_window_of_bf16():
    seen = window_of(LARGE, 20, passed_through="float16", floor_exponent=-38)
    session = run_with(overflow(7, 2.0**13), tensors={activation("fc"): seen})
    assert analyse(session).loss_scale.highest == 2.0**12
    from mpinspect.numeric.formats import BFLOAT16

    assert analyse(session, BFLOAT16).loss_scale.highest > 2.0**100


# -- the window's upper end has a margin, from the spread of the peaks ----------------------------------------------------


def test_varying_peaks_lower_the_window_by_a_reported_margin():
    steady = log2_highest([{-6: 40}], FLOAT16, 2000)
    varying = log2_highest([{-6: 2, -7: 8, -8: 20, -9: 10}], FLOAT16, 2000)
    # All peaks lie in one octave, but their position in it is unknown: a margin of one.
    assert steady == Ceiling(20, 1, log2_of_finite=21)
    assert varying.margin >= 1
    assert varying.log2_highest == 21 - varying.margin
    window = Window(0, 39, 40, {activation("fc"): window_of(LARGE, 40)}, {-6: 2, -7: 8, -8: 20, -9: 10})
    report = analyse(Session(windows=(window,), progress=Progress(40, 40, 0, 40, True)))
    assert report.loss_scale.highest == 2.0**varying.log2_highest
    assert (
        "by the spread of the peaks so far, fewer than one step in 2000 would overflow (95% confidence)"
        in report.loss_scale.reason
    )


def test_a_drift_of_the_peaks_does_not_count_as_spread():
    falling = [{-4 - i: 10} for i in range(8)]
    assert log2_highest(falling, FLOAT16, 2000) == Ceiling(18, 1, log2_of_finite=19)


def test_the_margin_never_excludes_scale_1():
    assert log2_highest([{15: 2, 13: 20, 11: 8}], FLOAT16, 2000) == Ceiling(0, log2_of_finite=0, lacking=2)
    window = Window(0, 29, 30, {activation("fc"): window_of(spread({-2: 10, 15: 1}), 30)}, {15: 2, 13: 20, 11: 8})
    advice = analyse(Session(windows=(window,), progress=Progress(30, 30, 0, 30, True))).loss_scale
    assert (advice.needed, advice.highest, advice.reserve) == (False, 1.0, 0)
    assert "calls for 2 powers of two more in reserve than 2^0 leaves" in advice.reason


def test_a_scale_below_1_has_a_reserve():
    """These are raw gradients of a heavily clipped task; with another seed they were 4 times as large and all overflowed."""
    assert log2_highest([{18: 40}], FLOAT16, 2000) == Ceiling(-4, 1, log2_of_finite=-3)
    falling = [{17: 2, 16: 3}, {15: 2, 14: 3}, {14: 1, 13: 4}]
    assert log2_highest(falling, FLOAT16, 2000).log2_highest <= -4


def test_the_reserve_does_not_exclude_a_scale_that_serves_every_layer():
    """Small gradients that need this scale were counted; gradients above the counted maximum are hypothetical."""
    peaks = {6: 2, 2: 10, -2: 18}
    tensors = {activation("small"): window_of(spread({-32: 1000}), 30), weight("large"): window_of(spread({6: 10}), 30)}
    window = Window(0, 29, 30, tensors, peaks)
    advice = analyse(Session(windows=(window,), progress=Progress(30, 30, 0, 30, True))).loss_scale
    assert log2_highest([peaks], FLOAT16, 2000).log2_highest < 7
    assert (advice.lowest, advice.highest, advice.reserve) == (2.0**7, 2.0**7, 2)
    assert not advice.conflicts
    assert "of two more in reserve than 2^7" in advice.reason


@pytest.mark.parametrize(
    ("n", "covered", "table"), [(10, 0.9, 2.355), (20, 0.99, 3.295), (50, 0.99, 2.862), (100, 0.95, 1.927)]
)
def test_tolerance_factors_agree_with_published_tables(n, covered, table):
    """One-sided tolerance factors at 95% (noncentral t, Natrella 1963, table A-7); the function approximates them."""
    assert tolerance_factor(n, n - 1, 1 - covered) == pytest.approx(table, rel=0.04)


def test_peaks_of_overflowed_steps_do_not_count_as_spread():
    """At the scales 2^16 to 2^9 a gradient of 2^8 is infinite, so the finite peaks are 2^0 to 2^7."""
    seen = window_of(spread({-2: 100, 8: 1}), 25, passed_through="float16", floor_exponent=-32)
    peaks = dict.fromkeys(range(8), 1) | {8: 17}
    scales = tuple(ScaleChange(step, 2.0 ** (16 - step)) for step in range(9))
    session = Session(
        windows=(Window(0, 24, 25, {weight("w"): seen}, peaks),), progress=Progress(25, 25, 8, 25, True, scales=scales)
    )
    # The other 17 steps have their peak at 2^8, at the scale 2^8, and do not overflow.
    assert analyse(session).loss_scale.highest == 2.0**7


def test_the_bound_covers_the_true_quantile_of_the_peaks():
    generator = np.random.default_rng(0)
    true_quantile = -8 + 3.29 * 1.5
    covered = 0
    for _ in range(300):
        peaks = np.floor(generator.normal(-8, 1.5, 60)).astype(int)
        exponents, counts = np.unique(peaks, return_counts=True)
        highest = log2_highest([dict(zip(exponents.tolist(), counts.tolist(), strict=True))], FLOAT16, 2000)
        covered += highest.log2_highest <= 15 - math.floor(true_quantile)
    assert covered >= 0.93 * 300


# -- a single threshold and a single scale ------------------------------------------------------------------------------


def losing(share):
    """Return counts at 2^-30 and 2^-15; scale 1 flushes those at 2^-30, this share of the sum of magnitudes."""
    return spread({-30: round(share / (1 - share) * 1000 * 2**15), -15: 1000})


@pytest.mark.parametrize("share", [0.0055, 0.0074, 0.0099])
def test_losses_below_the_threshold_need_no_scale(share):
    report = analyse(session_of({activation("fc"): losing(share)}))
    assert (report.loss_scale.needed, report.loss_scale.recommended) == (False, 1.0)
    assert finding(report, "gradients-flushed") is None
    assert "losses up to 1% have not changed any training measured" in report.loss_scale.reason
    assert all(found.severity == "info" for found in report.findings)


@pytest.mark.parametrize("share", [0.011, 0.015, 0.1, 0.9])
def test_losses_above_the_threshold_need_a_scale(share):
    report = analyse(session_of({activation("fc"): losing(share)}))
    assert report.loss_scale.needed is True
    assert finding(report, "gradients-flushed").severity == "warning"
    # The recommended scale loses far less than the threshold.
    scaled = losing(share).lost_l1_share(FLOAT16, int(math.log2(report.loss_scale.recommended))).estimate
    assert scaled <= 1e-6


def test_a_report_has_one_scale_though_the_window_moves():
    blocks = [{activation("fc"): spread({-30 - i: 10**7, -9 - i: 100})} for i in range(6)]
    report = analyse(session_of(*blocks, steps=40))
    advice = report.loss_scale
    assert advice.needed
    assert advice.static_scale == advice.recommended == advice.dynamic.init_scale
    page = render(report, ".txt", width=200)
    assert "A dynamic scaler may begin with it: torch.amp.GradScaler" in page


def test_the_report_says_that_no_fixed_scale_serves_the_whole_run():
    blocks = [{activation("fc"): spread({8: 1000})}] * 3 + [{activation("fc"): spread({-38: 1000})}] * 3
    report = analyse(session_of(*blocks, steps=20))
    assert "No one scale serves the whole run: 'fc' needs at least 2^13 in steps 60-79" in report.loss_scale.reason
    assert finding(report, "scale-window-empty") is not None


def test_no_fix_multiplies_the_loss_by_a_scale_that_flushes_a_layer():
    tensors = {activation("deep"): spread({-40: 1000}), activation("head"): spread({18: 1000})}
    report = analyse(session_of(tensors))
    assert report.loss_scale.recommended == report.loss_scale.highest == 2.0**-5
    assert finding(report, "gradients-flushed").evidence["flushed_fraction"] == 1.0
    for found in report.findings:
        assert "Multiply the loss" not in found.fix
        assert "multiply the loss" not in found.fix


def test_values_flushed_before_counting_make_the_need_unknown():
    """Zeros counted at scale 1 may be flushed values, so the flushed share is between 0% and 96%."""
    seen = window_of(spread({-24: 4000, -20: 100}, zeros=100_000), passed_through="float16", floor_exponent=-25)
    report = analyse(session_of({activation("fc"): seen}))
    assert report.loss_scale.needed is None
    page = " ".join(render(report, ".txt", width=200).split())
    assert "(if one is needed); window ? .. 2^" in page
    assert "serves every" not in page
    assert "To find out whether one is needed, run at a loss scale of at least 2^" in page


# -- windows that are not evidence ---------------------------------------------------------------------------------------


def test_no_scale_is_suggested_after_a_divergence():
    blocks = [{weight("w"): spread({low - 10: 1000, low: 10})} for low in (-4, -3, 20, 70, 111)]
    report = analyse(session_of(*blocks))
    assert report.loss_scale.recommended is None
    assert (
        "The training diverged. Its largest gradients rose from 2^-4 in step 0 to 2^111 in step 49"
        in report.loss_scale.reason
    )
    assert finding(report, "training-diverged").severity == "warning"


def test_large_gradients_from_the_start_are_not_a_divergence():
    """The loss is a sum over many samples."""
    blocks = [{weight("w"): spread({10: 1000, 20: 10})}] * 4
    assert analyse(session_of(*blocks)).loss_scale.recommended == 2.0**-9


def test_windows_under_a_collapsed_scale_are_excluded_from_the_advice():
    good = {activation("fc"): window_of(LARGE, passed_through="float16", floor_exponent=-38)}
    bad = {activation("fc"): window_of(spread({}, zeros=1010), passed_through="float16", floor_exponent=75)}
    nans = tuple(
        overflow(step, 2.0 ** (13 - 10 * (step - 10)), phase="forward", value="nan", forward_finite=False)
        for step in range(10, 20)
    )
    scales = (ScaleChange(0, 2.0**13), *(ScaleChange(10 + i, 2.0 ** (13 - 10 * i)) for i in range(11)))
    progress = Progress(20, 20, 10, 20, True, scales=scales)
    whole = analyse(session_of(good, bad, progress=progress, events=nans))
    alone = analyse(session_of(good))
    assert (whole.loss_scale.needed, whole.loss_scale.lowest) == (alone.loss_scale.needed, alone.loss_scale.lowest)
    assert whole.loss_scale.needed is False
    assert "The counts of steps 10-19 are left out: the loss scale had collapsed there" in whole.loss_scale.reason
    # The layers still contain all counts.
    assert whole.layers[0].histogram.zeros == 1010
    only = analyse(session_of(bad, progress=replace(progress, scales=(ScaleChange(0, 1e-30),))))
    assert not only.loss_scale.available
    assert "the loss scale had collapsed there, to 2^-100" in only.loss_scale.reason


def test_windows_under_a_small_scale_that_fits_are_evidence():
    seen = {activation("fc"): spread({10: 1000, 20: 10})}
    progress = Progress(10, 10, 3, 10, True, scales=(ScaleChange(0, 2.0**-6),))
    assert analyse(session_of(seen, progress=progress)).loss_scale.available


# -- samples represent the whole run --------------------------------------------------------------------------------------


def sampled(shares, firsts, steps):
    """Return a session with a window per sampled step; scale 1 flushes this share of its elements and magnitudes."""
    windows = []
    for share, first in zip(shares, firsts, strict=True):
        # Only the exponents -26 and -25 occur; the first is flushed, the second is not.
        histogram = ExponentHistogram.from_counts([round(2000 * share), 2000 - round(2000 * share)], -26)
        windows.append(Window(first, first, 1, {activation("fc"): window_of(histogram, 1)}, {-25: 1}))
    return Session(windows=tuple(windows), progress=Progress(steps, len(windows), 0, steps, True))


def test_samples_are_weighted_by_the_steps_that_they_represent():
    """Ten consecutive steps flush nothing, then every hundredth step flushes 60%: 30% pooled, 55% over the run."""
    report = analyse(sampled([0.0] * 10 + [0.6] * 10, [*range(10), *range(100, 1100, 100)], 1100))
    (layer,) = report.layers
    assert layer.histogram.flushed_fraction(FLOAT16) == pytest.approx(0.30)
    # Sample 9 represents steps 9 to 99.
    truth = 0.6 * 1000 / 1100
    assert layer.flushed_fraction.estimate == pytest.approx(truth, abs=0.02)
    assert layer.flushed_fraction.low < layer.flushed_fraction.estimate < layer.flushed_fraction.high
    assert layer.histogram.total == 20 * 2000
    # The strip and the column at the recommended scale use the same weighted counts.
    strip = range_strip(layer.representative, FLOAT16)
    assert strip.below + sum(strip.parts[0]) == pytest.approx(layer.flushed_fraction.estimate)
    at_recommended = flushed_at_recommended(layer, report).estimate
    assert at_recommended == layer.representative.flushed_fraction(FLOAT16, log2_recommended(report.loss_scale))


def test_samples_that_represent_equally_many_steps_give_an_exact_share():
    report = analyse(sampled([0.25] * 10, range(0, 1000, 100), 1000))
    (layer,) = report.layers
    assert layer.flushed_fraction.low == layer.flushed_fraction.high == 0.25


def test_small_gradients_late_in_the_run_need_a_scale_despite_a_small_pooled_share():
    early, late = spread({-10: 10**6}), spread({-30: 120_000 * 40, -24: 1000 * 40})
    report = analyse(session_of(*[{activation("fc"): early}] * 7, {activation("fc"): late}, steps=100))
    (layer,) = report.layers
    assert layer.lost_l1_share.estimate < 1e-3
    assert report.loss_scale.needed is True
    assert "in steps 700-799" in report.loss_scale.reason
    assert finding(report, "gradients-flushed").evidence["steps"] == [700, 799]
    assert layer.log2_scale_needed > 0


# -- loops that scale by hand ---------------------------------------------------------------------------------------------


def by_hand(scale, update, steps=12):
    """Train under FP16 autocast with a loss scaled by hand, without passing the scale to the inspector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), Inspector(model) as inspector:
        warnings.simplefilter("ignore", MpinspectWarning)
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            (loss * scale).backward()
            if all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters()):
                update(model, optimizer, scale)
    is_known = scale != 1 and is_power_of_two(scale)
    assert any("no scaler was seen" in note for note in inspector.session().notes) is not is_known
    return inspector.report()


def divide_and_step(model, optimizer, scale):
    for parameter in model.parameters():
        parameter.grad /= scale
    optimizer.step()


def through_data(model, optimizer, scale):
    for parameter in model.parameters():
        parameter.data -= 0.1 / scale * parameter.grad


def without_grad(model, optimizer, scale):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 / scale * parameter.grad


@pytest.mark.parametrize("update", [divide_and_step, through_data, without_grad])
@pytest.mark.parametrize("scale", [1000.0, 1.0])
def test_the_scale_of_a_loop_that_scales_by_hand_is_unknown(scale, update):
    report = by_hand(scale, update)
    assert contradictions(report) == []
    assert not report.session.progress.scale_known
    assert report.loss_scale.recommended is None
    assert (
        "As the gradients arrive, FP16 flushes <0.001% of the sum of magnitudes of any of them"
        in report.loss_scale.reason
    )
    assert report.session.progress.weights_moved is True
    assert "no update" not in render(report, ".txt", width=200)


@pytest.mark.parametrize("update", [divide_and_step, through_data, without_grad])
def test_a_power_of_two_by_which_a_loop_multiplies_its_loss_is_its_scale(update):
    report = by_hand(1024.0, update)
    assert contradictions(report) == []
    assert [change.scale for change in report.session.progress.scales] == [1024.0]
    assert report.loss_scale.available


def test_an_unknown_scale_is_too_high_if_gradients_overflow_after_a_finite_forward():
    report = by_hand(3.0e6, divide_and_step)
    assert contradictions(report) == []
    assert report.session.progress.weights_moved is False
    broke = finding(report, "non-finite-event")
    assert "The forward was finite, so the factor that multiplies the loss is too high" in broke.message
    assert "None of 12 backwards led to an update." in broke.message
    assert "As the gradients arrive, they overflow FP16" in report.loss_scale.reason
    assert report.loss_scale.recommended is None


def test_a_known_scale_that_is_too_high_is_reported_with_its_value():
    report = analyse(run_with(overflow(7, 2.0**20, skipped=None)))
    assert "so a loss scale of 1048576 is too high" in finding(report, "non-finite-event").message


def test_the_window_excludes_an_overflowed_scale_even_if_a_layer_needs_it():
    # 'b' needs 2^-3. 'a' allows up to 2^-2, but the run overflowed at 2^-3.
    block = {activation("a"): window_of(spread({17: 1})), activation("b"): window_of(spread({-22: 1}))}
    progress = Progress(10, 10, 1, 10, True, True, "nobody gave it")
    report = analyse(session_of(block, progress=progress, events=(overflow(0, 0.125, skipped=None),)))
    assert report.loss_scale.lowest == 0.125
    assert report.loss_scale.highest == 0.0625


# -- random sessions --------------------------------------------------------------------------------------------------------

shapes = st.dictionaries(st.integers(-45, 19), st.integers(1, 10**6), min_size=1, max_size=8)
tensors = st.builds(
    lambda counts, zeros, log2_run: window_of(
        spread({e: n for e, n in counts.items() if log2_run is None or e > -25 - log2_run}, zeros=zeros),
        passed_through="float32" if log2_run is None else "float16",
        floor_exponent=None if log2_run is None else -25 - log2_run,
    ),
    shapes,
    st.integers(0, 10**6),
    st.none() | st.integers(-4, 16),
)
blocks = st.dictionaries(st.sampled_from([activation("a"), activation("b"), weight("a.weight")]), tensors, min_size=1)
events = st.builds(
    overflow,
    st.integers(0, 80),
    st.sampled_from([None, 0.125, 1.0, 3.0, 2.0**13, 2.0**16]),
    value=st.sampled_from(["inf", "nan"]),
    skipped=st.none() | st.booleans(),
    forward_finite=st.none() | st.booleans(),
    phase=st.sampled_from(["forward", "backward"]),
    last_maxima=st.sampled_from([(), (1.0,), (2.0**14,)]),
)
changes = st.lists(
    st.builds(ScaleChange, st.integers(0, 80), st.sampled_from([None, 1e-30, 0.5, 1.0, 2.0**16])), max_size=3
).map(lambda found: tuple(sorted(found, key=lambda change: change.step)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(blocks, min_size=1, max_size=4),
    st.lists(events, max_size=3),
    changes,
    st.sampled_from([1, 7]),
    st.none() | st.booleans(),
    st.booleans(),
)
def test_no_report_contradicts_itself(found, broke, scales, stretch, moved, known):
    steps = 10 * len(found) * stretch
    progress = Progress(
        steps, 10 * len(found), 1, steps, True, known, "nobody gave it", scales=scales, weights_moved=moved
    )
    session = session_of(*found, progress=progress, events=tuple(broke))
    # Stretching leaves unsampled steps between the windows.
    windows = tuple(
        replace(window, first_step=window.first_step * stretch, last_step=window.last_step * stretch)
        for window in session.windows
    )
    analyse(replace(session, windows=windows))
