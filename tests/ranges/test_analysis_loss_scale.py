"""The recommended loss scale has exact values for hand-made histograms, and obeys laws for random ones."""

import math

import pytest
from agreeing_reports import recommend_loss_scale
from analysis_sessions import activation, logits, session_of, spread, through_fp16, weight, window_of
from hypothesis import given
from hypothesis import strategies as st

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.numeric.formats import BFLOAT16, FLOAT16
from mpinspect.ranges.analysis.drift import growth_interval, time_blocks
from mpinspect.ranges.analysis.overflow_odds import (
    Ceiling,
    log2_highest,
    overflow_probability_bound,
    tolerated_overflows,
)
from mpinspect.ranges.analysis.report import ScaleConflict, TimeBlock
from mpinspect.ranges.session import Progress, Session
from mpinspect.ranges.windows.window import Window

finite_spreads = st.dictionaries(st.integers(-60, 20), st.integers(1, 10**6), min_size=1, max_size=12).map(spread)

# -- from histograms alone ----------------------------------------------------------------------------------------


def test_the_scale_of_a_language_model_follows_from_its_histograms():
    largest = ExponentHistogram.from_counts([5, 1000], -6, max_abs=2.0**-4.2)
    advice = recommend_loss_scale({"decoder": logits(), "decoder.weight": largest})
    assert advice.needed
    assert advice.recommended == 4096.0
    assert (advice.lowest, advice.highest, advice.headroom) == (2.0**4, 2.0**20, 8)
    assert advice.worst_layer == "decoder"
    assert advice.flushed_fraction_unscaled == pytest.approx(0.879, abs=0.001)
    assert advice.flushed_fraction_scaled == pytest.approx(3.0e-4, abs=1e-5)
    assert "'decoder'" in advice.reason
    assert "4096 (2^12)" in advice.reason


def test_one_histogram_an_iterable_and_a_mapping_give_the_same_advice():
    one, many, named = (recommend_loss_scale(given) for given in (logits(), [logits()], {"0": logits()}))
    assert one == many == named


def test_healthy_gradients_need_no_scale_but_have_a_window():
    # Half of the elements are zeros, most magnitudes are near 2^-12, and a few are far smaller.
    advice = recommend_loss_scale(spread({-40: 3, -14: 5000, -12: 20000, -6: 10}, zeros=25000))
    assert advice.needed is False
    assert advice.recommended == 1.0
    assert (advice.lowest, advice.highest) == (2.0**-11, 2.0**21)
    assert advice.static_scale == 1.0


def test_the_recommended_scale_can_be_below_1():
    # 2^18 overflows at scale 1.
    advice = recommend_loss_scale(spread({0: 1000, 18: 10}))
    assert advice.needed
    assert advice.highest == 2.0**-3
    assert advice.recommended == 2.0**-6
    assert advice.recommended >= advice.lowest


def test_layers_without_a_common_scale_are_listed_as_conflicts():
    layers = {"embedding": spread({-40: 1000}), "head": spread({12: 1000}), "middle": spread({-10: 1000})}
    advice = recommend_loss_scale(layers)
    assert advice.needed
    assert advice.conflicts == (ScaleConflict("embedding", 15, "head", 3),)
    assert advice.recommended == 2.0**3
    assert advice.lowest > advice.highest
    assert "'embedding' needs at least 2^15" in advice.reason


def test_a_layer_can_conflict_with_itself():
    wide = recommend_loss_scale({"fc": spread({-34: 10**15, 14: 1})})
    assert wide.conflicts == (ScaleConflict("fc", 9, "fc", 1),)


def test_zeros_and_infinities_do_not_change_the_advice():
    # Rules on the log2 of each step's maximum would fail for a maximum of zero or infinity.
    clean = recommend_loss_scale({"fc": logits()})
    dead = spread({}, zeros=1000)
    broken = ExponentHistogram.from_counts([], 0, infs=3, nans=4)
    poisoned = recommend_loss_scale({"fc": logits() + dead + broken, "dead": dead, "broken": broken})
    assert (poisoned.recommended, poisoned.lowest, poisoned.highest) == (clean.recommended, clean.lowest, clean.highest)


@pytest.mark.parametrize("nothing", [{}, [], {"a": spread({})}, {"a": spread({}, zeros=9, nans=1)}, Session()])
def test_there_is_no_advice_without_finite_gradients(nothing):
    advice = recommend_loss_scale(nothing)
    assert (advice.available, advice.needed, advice.recommended) == (False, None, None)
    assert "gradient" in advice.reason


@pytest.mark.parametrize("wrong", [3.0, [1, 2], {"a": "b"}])
def test_arguments_that_are_not_histograms_are_refused(wrong):
    with pytest.raises(TypeError, match="count_exponents"):
        recommend_loss_scale(wrong)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1.0}, {"growth_interval": 0}, {"headroom": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recommend_loss_scale(logits(), **options)


def test_bfloat16_needs_no_scale_for_gradients_that_need_one_in_float16():
    assert recommend_loss_scale(logits(), format=BFLOAT16).needed is False


@given(st.lists(finite_spreads, min_size=1, max_size=5), st.integers(0, 6))
def test_the_recommended_scale_is_in_the_window_unless_it_is_empty(layers, headroom):
    advice = recommend_loss_scale(layers, headroom=headroom)
    recommended = math.log2(advice.recommended)
    assert advice.recommended <= advice.highest
    assert math.log2(advice.highest) - recommended == advice.headroom
    if advice.lowest <= advice.highest:
        assert advice.lowest <= advice.recommended
        assert not advice.conflicts
    else:
        assert advice.conflicts
        assert all(pair.log2_lowest > pair.log2_highest for pair in advice.conflicts)
    assert all(layer.overflowed(FLOAT16, int(recommended)) == 0 for layer in layers)
    assert advice.needed == (advice.lowest > 1 or advice.highest < 1)


@given(st.lists(finite_spreads, min_size=1, max_size=4), st.integers(-20, 20))
def test_the_window_moves_with_the_gradients(layers, k):
    """Gradients that are 2^k times as large need a scale that is 2^-k times as large."""
    advice = recommend_loss_scale(layers)
    moved = recommend_loss_scale([layer.shifted(k) for layer in layers])
    assert moved.lowest == advice.lowest * 2.0**-k
    assert moved.highest == advice.highest * 2.0**-k


@given(st.lists(finite_spreads, min_size=1, max_size=4), finite_spreads)
def test_another_layer_never_widens_the_window(layers, one_more):
    before, after = recommend_loss_scale(layers), recommend_loss_scale([*layers, one_more])
    assert after.lowest >= before.lowest
    assert after.highest <= before.highest


# -- confidence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2**53, 2**63 - 1])
def test_bounds_for_astronomical_numbers_of_steps_are_computed_fast(steps):
    tolerated = tolerated_overflows(steps, 1 / 2000)
    assert 0.999 < tolerated / (steps / 2000) < 1
    assert overflow_probability_bound(0, steps) == 3 / steps
    assert overflow_probability_bound(steps // 2000, steps) == pytest.approx(1 / 2000, rel=1e-3)
    assert overflow_probability_bound(steps, steps) == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [19_990_000, 20_010_000])
def test_the_normal_approximation_agrees_with_the_binomial_at_the_switch(steps):
    """The switch is at 10,000 overflows, where both values differ by at most one."""
    per_overflow = tolerated_overflows(steps, 1 / 2000) - steps / 2000
    assert -167 <= per_overflow <= -164  # -1.645 sqrt(10,000) = -164.5
    before, after = overflow_probability_bound(9_999, 10**7), overflow_probability_bound(10_001, 10**7)
    assert before < after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize(("steps", "tolerated"), [(1, 0), (5990, 0), (9500, 1), (100_000, 38)])
def test_tolerated_overflows_match_the_exact_binomial(steps, tolerated):
    found = tolerated_overflows(steps, 1 / 2000)
    # Independent check, for few steps: P(X <= m) as a sum over math.comb.
    assert found == tolerated
    if steps <= 10_000:
        p = 1 / 2000
        cdf = [sum(math.comb(steps, i) * p**i * (1 - p) ** (steps - i) for i in range(m + 1)) for m in range(found + 2)]
        assert cdf[found + 1] > 0.05
        assert found == 0 or cdf[found] <= 0.05


def test_few_steps_use_the_largest_peak_and_many_steps_ignore_outliers():
    assert log2_highest([{-4: 1, -10: 99}], FLOAT16, 2000) == Ceiling(19, log2_of_finite=19)
    # In 100,000 steps 38 may be ignored: the 20 steps at 2^3 are, the 60 steps at 2^-1 are not.
    assert log2_highest([{3: 20, -1: 60, -10: 99_920}], FLOAT16, 2000) == Ceiling(16, log2_of_finite=12)
    assert log2_highest([], FLOAT16, 2000) is None
    assert log2_highest([{}], FLOAT16, 2000) is None


def test_the_bound_is_the_rule_of_three_or_clopper_pearson():
    assert overflow_probability_bound(0, 300) == 0.01
    assert overflow_probability_bound(0, 1) == 1.0
    assert overflow_probability_bound(0, 0) is None
    # Clopper-Pearson, one-sided 95%: 1 of 100 -> 0.0466, 5 of 100 -> 0.1023.
    assert overflow_probability_bound(1, 100) == pytest.approx(0.0466, abs=1e-4)
    assert overflow_probability_bound(5, 100) == pytest.approx(0.1023, abs=1e-4)
    assert overflow_probability_bound(3, 3) == pytest.approx(1.0)


def test_the_rule_of_three_covers_the_exact_bound():
    for steps in (3, 10, 100, 10_000):
        assert overflow_probability_bound(0, steps) >= 1 - 0.05 ** (1 / steps) - 1e-12


def test_the_advice_for_a_session_states_its_confidence():
    advice = recommend_loss_scale(session_of({activation("fc"): logits()}, steps=150))
    assert (advice.samples, advice.overflow_probability_bound) == (150, 0.02)
    # Rule of three: 3/150 is one in 50.
    assert (
        "No overflow at 2^12 in 150 sampled steps, so fewer than one step in 50 would (95% confidence)" in advice.reason
    )


def test_values_near_the_next_power_of_two_count_as_it():
    # (2 - 2^-12) times 2^15 is 65528, which overflows.
    near = ExponentHistogram.from_counts([1], 0, near_top=[1], max_abs=2 - 2**-12)
    assert recommend_loss_scale(near).highest == 2.0**14
    advice = recommend_loss_scale(session_of({weight("w"): near}))
    # With ten steps the reserve is two powers of two.
    assert (advice.highest, advice.reserve) == (2.0**12, 2)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_an_unknown_loss_scale_gives_a_reason_instead_of_advice():
    progress = Progress(10, 10, 0, 10, True, scale_known=False, scale_unknown_reason="a scaler was found too late.")
    advice = recommend_loss_scale(session_of({weight("w"): logits()}, progress=progress))
    assert not advice.available
    assert advice.reason.startswith("A scaler was found too late.")
    assert "loss_scale=" in advice.reason


def test_gradients_rounded_at_scale_1_do_not_count_as_healthy():
    """Autocast without a scale flushes small gradients before they are counted; many others are near the flush edge."""
    seen = window_of(through_fp16(logits()), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("decoder"): seen}))
    # No counted value is lost at scale 1, but values flushed before are unknown.
    assert advice.needed is None
    assert "is not known" in advice.reason
    assert "serves every" not in advice.reason
    assert "in FP32 (autocast off, scale 1)" in advice.reason
    # The recommended scale loses at most a hundredth of the original gradients.
    assert logits().lost_l1_share(FLOAT16, int(math.log2(advice.recommended))).estimate <= 1e-2


def test_zeros_under_autocast_are_not_reported_if_no_value_is_small():
    seen = window_of(spread({-12: 10_000}, zeros=30_000), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("relu"): seen}))
    assert (advice.needed, advice.recommended) == (False, 1.0)


def test_many_zeros_under_autocast_make_the_need_unknown():
    # If these zeros were flushed values, their sum could exceed the tolerance; but no counted value is near the flush edge.
    seen = window_of(spread({-16: 1000}, zeros=100_000), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("relu"): seen}))
    assert advice.needed is None
    # The recommended scale serves the layer in any case: 100,000 values of 2^(-25 - k) are at most a hundredth of the sum.
    k = math.log2(advice.recommended)
    assert 100_000 * 2.0 ** (-25 - k) <= 1e-2 * 1.5 * 1000 * 2.0**-16
    assert "not known" in advice.reason


def test_a_run_at_a_large_scale_gives_the_exact_advice():
    seen = window_of(through_fp16(logits(), 16), passed_through="float16", floor_exponent=-41)
    advice = recommend_loss_scale(session_of({activation("decoder"): seen}))
    assert (advice.needed, advice.recommended) == (True, 4096.0)


# -- over time --------------------------------------------------------------------------------------------------------


def test_a_static_scale_fits_all_blocks_and_the_growth_interval_follows_the_drift():
    blocks = [{activation("fc"): spread({-20 - 2 * i: 1000, -3 - 2 * i: 1})} for i in range(4)]
    advice = recommend_loss_scale(session_of(*blocks, steps=100))
    assert [block.log2_highest for block in advice.blocks] == [17, 19, 21, 23]
    assert [(block.first_step, block.last_step) for block in advice.blocks] == [
        (0, 99),
        (100, 199),
        (200, 299),
        (300, 399),
    ]
    assert advice.highest == 2.0**17
    assert advice.static_scale <= 2.0**15
    # The window rises by 6 powers of two in the 300 steps between the middles of the first and the last block.
    assert advice.dynamic.growth_interval == 100
    slow = [TimeBlock(i * 1000, i * 1000 + 999, 0, 10 + i) for i in range(3)]
    assert growth_interval(slow) == 1000


@pytest.mark.parametrize(
    ("highest", "expected"), [([18], 2000), ([18, 18], 2000), ([24, 18], 2000), ([18, 19], 2000), ([None, None], 2000)]
)
def test_the_growth_interval_is_the_default_without_a_rise(highest, expected):
    blocks = [TimeBlock(i * 10, i * 10 + 9, 0, top) for i, top in enumerate(highest)]
    assert growth_interval(blocks) == expected


def test_windows_are_grouped_into_at_most_eight_ordered_blocks():
    windows = [Window(i * 10, i * 10 + 9, 10, {}) for i in range(100)]
    blocks = time_blocks(windows[::-1])
    assert [window for block in blocks for window in block] == windows
    assert len(blocks) == 8
    assert {len(block) for block in blocks} <= {12, 13}
    assert time_blocks([]) == []
    assert len(time_blocks([Window(0, 9, 0, {}), Window(10, 19, 0, {})])) == 1


def test_a_block_without_gradients_has_an_unknown_window():
    advice = recommend_loss_scale(session_of({weight("w"): logits()}, {weight("w"): spread({}, zeros=5)}))
    assert [block.log2_lowest is None for block in advice.blocks] == [False, True]


def test_a_mean_over_more_samples_moves_the_window():
    """A mean over N times as many samples moves it by log2 N."""
    one = recommend_loss_scale({"decoder": logits()})
    of_eight = recommend_loss_scale({"decoder": logits().shifted(-3)})
    assert (of_eight.lowest, of_eight.highest) == (8 * one.lowest, 8 * one.highest)
    assert of_eight.recommended == 8 * one.recommended
