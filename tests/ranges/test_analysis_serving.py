"""The least scale that serves a tensor, and bounds on values that were flushed before they were counted."""

import math

import pytest
from analysis_sessions import cut_below, logits, spread, through_fp16, window_of
from hypothesis import given
from hypothesis import strategies as st

from mpinspect.numeric.exponents import ExponentHistogram, Interval
from mpinspect.numeric.formats import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT16_FTZ, FLOAT32
from mpinspect.ranges.analysis.layer_report import layer_report
from mpinspect.ranges.analysis.serving import LOST_L1_TOLERANCE, NEGLIGIBLE_L1_SHARE, least_log2_scale
from mpinspect.ranges.analysis.visibility import Visibility
from mpinspect.ranges.windows.tensors import TensorInfo

FORMATS = (FLOAT16, FLOAT16_FTZ, BFLOAT16, FLOAT8_E4M3)


@st.composite
def histograms(draw: st.DrawFn) -> ExponentHistogram:
    bins = draw(st.lists(st.tuples(*[st.integers(0, 10**9)] * 3), min_size=1, max_size=40))
    counts = [sum(bin) for bin in bins]
    counts[0] += 1
    return ExponentHistogram.from_counts(
        counts,
        draw(st.integers(-149, 100)),
        powers_of_two=[bin[0] for bin in bins],
        near_top=[bin[1] for bin in bins],
        zeros=draw(st.integers(0, 10**9)),
    )


@given(histograms(), st.sampled_from(FORMATS), st.floats(NEGLIGIBLE_L1_SHARE, 0.9))
def test_the_least_scale_is_the_smallest_power_of_two_within_the_tolerance(histogram, format, tolerance):
    k = least_log2_scale(histogram, format, tolerance)
    assert histogram.lost_l1_share(format, k).estimate <= tolerance * (1 + 1e-9)
    assert histogram.lost_l1_share(format, k - 1).estimate > tolerance * (1 - 1e-9)


@given(histograms(), st.sampled_from(FORMATS), st.integers(1, 10**9), st.integers(-60, 0))
def test_a_scale_for_hidden_values_covers_their_worst_case(histogram, format, hidden, floor):
    k = least_log2_scale(histogram, format, hidden=hidden, floor_exponent=floor)
    assert k >= least_log2_scale(histogram, format)
    whole = histogram.sum_abs().estimate
    lost = histogram.lost_l1_share(format, k).estimate * whole
    lost += hidden * 2.0 ** min(floor, format.flush_exponent - k)
    assert lost <= LOST_L1_TOLERANCE * whole * (1 + 1e-9)


def test_the_least_scale_of_a_single_value_is_exact():
    # 2^-25 is a tie and rounds to zero; larger values do not.
    assert least_log2_scale(spread({-25: 1}), FLOAT16) == 0
    tie = ExponentHistogram.from_counts([1], -25, powers_of_two=[1])
    assert least_log2_scale(tie, FLOAT16) == 1
    assert least_log2_scale(spread({0: 1}), FLOAT16) == -25
    assert least_log2_scale(spread({0: 1}), FLOAT16_FTZ) == -14
    assert least_log2_scale(tie, FLOAT16_FTZ) == 11


def test_a_tensor_without_values_needs_no_scale():
    assert least_log2_scale(spread({}, zeros=5, nans=1), FLOAT16) is None
    assert least_log2_scale(spread({}, infs=5), FLOAT16, NEGLIGIBLE_L1_SHARE) is None


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0, math.nan])
def test_a_tolerance_that_is_not_a_share_is_refused(tolerance):
    with pytest.raises(ValueError, match="share of the L1 mass"):
        least_log2_scale(spread({0: 1}), FLOAT16, tolerance)


def test_the_least_scale_agrees_with_measured_trainings():
    # In trainings, scale 8 (lost share 0.014) converges with a difference; scale 128 (0.0001) matches FP32.
    assert logits().lost_l1_share(FLOAT16).estimate == pytest.approx(0.109, abs=0.001)
    assert 3 < least_log2_scale(logits(), FLOAT16) <= 7


# -- values that passed through a narrow format ---------------------------------------------------------------


def test_shares_of_unrounded_values_are_exact():
    view = Visibility(spread({-30: 30, -10: 70}, zeros=500))
    assert view.flushed_fraction(FLOAT16) == Interval(0.3, 0.3, 0.3)
    assert view.already_flushed_fraction() is None
    assert view.lost_l1_share(FLOAT16) == view.histogram.lost_l1_share(FLOAT16)
    assert view.likely_hidden_l1_share() == 0.0


def test_zeros_bound_the_share_flushed_before_counting():
    # Counted at scale 1: 100 visible values, of these 0 flushed, and 300 zeros.
    view = Visibility(spread({-20: 100}, zeros=300), floor_exponent=-25)
    assert view.flushed_fraction(FLOAT16) == Interval(0.0, 0.0, 300 / 400)
    assert view.already_flushed_fraction() == Interval(0.0, 0.0, 300 / 400)
    # Counted at scale 16 and evaluated at scale 1: 20 of the 100 values flush, and so do all hidden values.
    seen_at_16 = Visibility(spread({-28: 20, -20: 80}, zeros=300), floor_exponent=-29)
    assert seen_at_16.flushed_fraction(FLOAT16) == Interval(0.2, 0.2, 320 / 400)
    # At a larger scale than the run's, hidden values may survive.
    assert seen_at_16.flushed_fraction(FLOAT16, 5) == Interval(0.0, 0.0, 300 / 400)
    mixed = Visibility(spread({-31: 20, -20: 80}, zeros=300), -29)
    assert mixed.flushed_fraction(FLOAT16, 5) == Interval(0.2, 20 / 400, 320 / 400)


def test_the_lost_share_is_bounded_by_the_sum_of_hidden_values():
    view = Visibility(ExponentHistogram.from_counts([100], -20, powers_of_two=[100], zeros=300), floor_exponent=-25)
    hidden, visible = 300 * 2.0**-25, 100 * 2.0**-20
    share = view.lost_l1_share(FLOAT16)
    assert (share.estimate, share.low) == (0.0, 0.0)
    assert share.high == pytest.approx(hidden / (hidden + visible))


@given(histograms(), st.integers(0, 10**6), st.integers(-40, 10))
def test_the_true_shares_are_within_the_bounds(truth, more_zeros, log2_run):
    """The bounds from a histogram whose small values are hidden include the shares of the whole histogram."""
    # The cut is at a whole exponent, so the hidden values are known exactly.
    plain = ExponentHistogram.from_counts(truth.counts, truth.min_exponent, zeros=more_zeros)
    view = Visibility(cut_below(plain, -24 - log2_run), floor_exponent=-24 - log2_run)
    for k in (log2_run - 20, log2_run - 1, log2_run, log2_run + 7):
        fraction = view.flushed_fraction(FLOAT16, k)
        assert fraction.low - 1e-12 <= plain.flushed_fraction(FLOAT16, k) <= fraction.high + 1e-12
        share, true_share = view.lost_l1_share(FLOAT16, k), plain.lost_l1_share(FLOAT16, k)
        assert share.low <= true_share.high * (1 + 1e-9)
        assert share.high >= true_share.low * (1 - 1e-9)


def test_shares_are_unknown_if_all_values_are_hidden():
    view = Visibility(spread({}, zeros=10), floor_exponent=-25)
    assert view.flushed_fraction(FLOAT16) == Interval(0.0, 0.0, 1.0)
    assert view.lost_l1_share(FLOAT16) == Interval(0.0, 0.0, 1.0)
    assert Visibility(spread({}), -25).flushed_fraction(FLOAT16) == Interval(0.0, 0.0, 0.0)


def test_many_values_near_the_floor_indicate_hidden_values():
    crowded = Visibility(through_fp16(logits()), floor_exponent=-25)
    assert crowded.likely_hidden_l1_share() > LOST_L1_TOLERANCE
    true_zeros = Visibility(spread({-12: 100_000, -24: 3}, zeros=900_000), floor_exponent=-25)
    assert true_zeros.likely_hidden_l1_share() < 1e-6


@pytest.mark.parametrize("top", [-1200, -20, 1500])
def test_the_likely_hidden_share_is_independent_of_the_magnitude(top):
    """A session can contain 2^-1200 and 2^1500, beyond float64; their sums are computed relative to the largest."""
    view = Visibility(spread({top - 3: 50, top: 50}, zeros=40), floor_exponent=top - 4)
    at_zero = Visibility(spread({-3: 50, 0: 50}, zeros=40), floor_exponent=-4)
    assert view.likely_hidden_l1_share() == at_zero.likely_hidden_l1_share() > 0
    assert Visibility(spread({top: 50}, zeros=40), top + 3000).likely_hidden_l1_share() == 0


def test_a_layer_report_depends_on_the_scale():
    info = TensorInfo("fc.weight", "weight_gradient", "fc", "Linear")
    window = window_of(spread({-30: 25, -20: 50, 10: 25}))
    report = layer_report(info, window, FLOAT16)
    assert report.flushed_fraction.estimate == 0.25
    assert report.subnormal_fraction == 0.5
    assert (report.range_offset, report.max_log2_scale, report.overflowed) == (5, 5, 0)
    assert report.already_flushed_fraction is None
    scaled = layer_report(info, window, FLOAT16, log2_scale=6)
    assert (scaled.flushed_fraction.estimate, scaled.overflowed) == (0.0, 25)
    assert math.isinf(scaled.noise_to_signal)


def test_a_tensor_that_never_arrived_has_an_empty_report():
    report = layer_report(TensorInfo("fc.weight", "weight_gradient", "fc", "Linear"), None, FLOAT32)
    assert (report.samples, report.histogram, report.flushed_fraction, report.lost_l1_share) == (0, None, None, None)


def test_values_at_the_ends_of_float64_raise_no_warning():
    """Sums beyond float64's range are inf instead of NaN, and the rounding error of tiny values is finite."""
    huge = ExponentHistogram.from_counts([1], 600)
    assert huge.sum_squares().low == math.inf
    assert huge.sum_squares().estimate == math.inf
    assert spread({-1074: 1}).noise_to_signal(FLOAT16) == 1.0
