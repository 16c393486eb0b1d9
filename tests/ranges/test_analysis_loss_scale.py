"""The recommended loss scale: exact on hand-made histograms, lawful on all others."""

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
from mpinspect.ranges.session import Progress, Session, Window

finite_spreads = st.dictionaries(st.integers(-60, 20), st.integers(1, 10**6), min_size=1, max_size=12).map(spread)

# -- from histograms alone ----------------------------------------------------------------------------------------


def test_language_model_gets_its_scale_from_its_histograms_alone():
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


def test_one_histogram_an_iterable_and_a_mapping_say_the_same():
    one, many, named = (recommend_loss_scale(given) for given in (logits(), [logits()], {"0": logits()}))
    assert one == many == named


def test_healthy_gradients_need_none_and_still_get_a_window():
    # Half of the elements are true zeros, magnitudes around 2^-12, a few stragglers far below.
    advice = recommend_loss_scale(spread({-40: 3, -14: 5000, -12: 20000, -6: 10}, zeros=25000))
    assert advice.needed is False
    assert advice.recommended == 1.0
    assert (advice.lowest, advice.highest) == (2.0**-11, 2.0**21)
    assert advice.static_scale == 1.0


def test_a_scale_below_1_is_found():
    # 2^18 overflows at scale 1; a floor of 1 would hide the answer.
    advice = recommend_loss_scale(spread({0: 1000, 18: 10}))
    assert advice.needed
    assert advice.highest == 2.0**-3
    assert advice.recommended == 2.0**-6
    assert advice.recommended >= advice.lowest


def test_layers_that_no_scale_serves_are_named():
    layers = {"embedding": spread({-40: 1000}), "head": spread({12: 1000}), "middle": spread({-10: 1000})}
    advice = recommend_loss_scale(layers)
    assert advice.needed
    assert advice.conflicts == (ScaleConflict("embedding", 15, "head", 3),)
    assert advice.recommended == 2.0**3
    assert advice.lowest > advice.highest
    assert "'embedding' needs at least 2^15" in advice.reason


def test_a_layer_can_be_at_odds_with_itself():
    wide = recommend_loss_scale({"fc": spread({-34: 10**15, 14: 1})})
    assert wide.conflicts == (ScaleConflict("fc", 9, "fc", 1),)


def test_zeros_and_infinities_poison_nothing():
    # LogMax rules take log2 of every step's maximum; one zero or infinite one spoils them for good.
    clean = recommend_loss_scale({"fc": logits()})
    dead = spread({}, zeros=1000)
    broken = ExponentHistogram.from_counts([], 0, infs=3, nans=4)
    poisoned = recommend_loss_scale({"fc": logits() + dead + broken, "dead": dead, "broken": broken})
    assert (poisoned.recommended, poisoned.lowest, poisoned.highest) == (clean.recommended, clean.lowest, clean.highest)


@pytest.mark.parametrize("nothing", [{}, [], {"a": spread({})}, {"a": spread({}, zeros=9, nans=1)}, Session()])
def test_nothing_to_go_by_is_said(nothing):
    advice = recommend_loss_scale(nothing)
    assert (advice.available, advice.needed, advice.recommended) == (False, None, None)
    assert "gradient" in advice.reason


@pytest.mark.parametrize("wrong", [3.0, [1, 2], {"a": "b"}])
def test_what_is_no_histogram_is_refused(wrong):
    with pytest.raises(TypeError, match="count_exponents"):
        recommend_loss_scale(wrong)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1.0}, {"growth_interval": 0}, {"headroom": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recommend_loss_scale(logits(), **options)


def test_bfloat16_needs_no_scale_where_float16_does():
    assert recommend_loss_scale(logits(), format=BFLOAT16).needed is False


@given(st.lists(finite_spreads, min_size=1, max_size=5), st.integers(0, 6))
def test_recommended_lies_in_a_window_that_is_not_empty(layers, headroom):
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
    """Gradients 2^k times as large (a batch 2^-k times as large, under a mean) want a scale 2^-k times as large."""
    advice = recommend_loss_scale(layers)
    moved = recommend_loss_scale([layer.shifted(k) for layer in layers])
    assert moved.lowest == advice.lowest * 2.0**-k
    assert moved.highest == advice.highest * 2.0**-k


@given(st.lists(finite_spreads, min_size=1, max_size=4), finite_spreads)
def test_another_layer_only_narrows_the_window(layers, one_more):
    before, after = recommend_loss_scale(layers), recommend_loss_scale([*layers, one_more])
    assert after.lowest >= before.lowest
    assert after.highest <= before.highest


# -- how sure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2**53, 2**63 - 1])
def test_any_number_of_steps_that_a_file_may_claim_is_answered_at_once(steps):
    tolerated = tolerated_overflows(steps, 1 / 2000)
    assert 0.999 < tolerated / (steps / 2000) < 1
    assert overflow_probability_bound(0, steps) == 3 / steps
    assert overflow_probability_bound(steps // 2000, steps) == pytest.approx(1 / 2000, rel=1e-3)
    assert overflow_probability_bound(steps, steps) == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [19_990_000, 20_010_000])
def test_the_normal_distribution_takes_over_where_it_agrees_with_the_binomial(steps):
    """10,000 overflows are where the one ends and the other begins: exact values, within one of each other."""
    per_overflow = tolerated_overflows(steps, 1 / 2000) - steps / 2000
    assert -167 <= per_overflow <= -164  # -1.645 sqrt(10,000) = -164.5
    before, after = overflow_probability_bound(9_999, 10**7), overflow_probability_bound(10_001, 10**7)
    assert before < after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize(("steps", "tolerated"), [(1, 0), (5990, 0), (9500, 1), (100_000, 38)])
def test_order_statistic_matches_the_binomial(steps, tolerated):
    found = tolerated_overflows(steps, 1 / 2000)
    # Independent check: P(X <= m) summed with exact integers' logarithms from math.comb where that is cheap.
    assert found == tolerated
    if steps <= 10_000:
        p = 1 / 2000
        cdf = [sum(math.comb(steps, i) * p**i * (1 - p) ** (steps - i) for i in range(m + 1)) for m in range(found + 2)]
        assert cdf[found + 1] > 0.05
        assert found == 0 or cdf[found] <= 0.05


def test_few_steps_go_by_the_largest_peak_and_many_pass_over_outliers():
    assert log2_highest([{-4: 1, -10: 99}], FLOAT16, 2000) == Ceiling(19, log2_of_finite=19)
    # In 100,000 steps 38 may be passed over: 20 steps at 2^3 are, 60 more at 2^-1 are not.
    assert log2_highest([{3: 20, -1: 60, -10: 99_920}], FLOAT16, 2000) == Ceiling(16, log2_of_finite=12)
    assert log2_highest([], FLOAT16, 2000) is None
    assert log2_highest([{}], FLOAT16, 2000) is None


def test_rule_of_three_and_beyond():
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


def test_confidence_is_given_for_a_session():
    advice = recommend_loss_scale(session_of({activation("fc"): logits()}, steps=150))
    assert (advice.samples, advice.overflow_probability_bound) == (150, 0.02)
    # Rule of three: 3/150 is one in 50.
    assert (
        "No overflow at 2^12 in 150 sampled steps, so fewer than one step in 50 would (95% confidence)" in advice.reason
    )


def test_highest_takes_near_top_values_for_the_next_power():
    # 2^0 * (2 - 2^-12) times 2^15 is 65528: that overflows.
    near = ExponentHistogram.from_counts([1], 0, near_top=[1], max_abs=2 - 2**-12)
    assert recommend_loss_scale(near).highest == 2.0**14
    advice = recommend_loss_scale(session_of({weight("w"): near}))
    # Of ten steps, two powers of two are kept in reserve.
    assert (advice.highest, advice.reserve) == (2.0**12, 2)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_unknown_scale_gives_no_advice_and_says_what_to_do():
    progress = Progress(10, 10, 0, 10, True, scale_known=False, scale_unknown_reason="a scaler was found too late.")
    advice = recommend_loss_scale(session_of({weight("w"): logits()}, progress=progress))
    assert not advice.available
    assert advice.reason.startswith("A scaler was found too late.")
    assert "loss_scale=" in advice.reason


def test_gradients_rounded_at_scale_1_are_not_taken_for_healthy():
    """Under autocast without a scale the flushed ones are gone; what is left crowds at the floor."""
    seen = window_of(through_fp16(logits()), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("decoder"): seen}))
    # Nothing that was seen is lost at scale 1, and what was flushed before can't be seen any more.
    assert advice.needed is None
    assert "is not known" in advice.reason
    assert "serves every" not in advice.reason
    assert "in FP32 (autocast off, scale 1)" in advice.reason
    # Whatever was flushed, the scale given keeps all but a hundredth.
    assert logits().lost_l1_share(FLOAT16, int(math.log2(advice.recommended))).estimate <= 1e-2


def test_true_zeros_under_autocast_are_no_alarm():
    seen = window_of(spread({-12: 10_000}, zeros=30_000), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("relu"): seen}))
    assert (advice.needed, advice.recommended) == (False, 1.0)


def test_what_the_zeros_leave_open_is_left_open():
    # So many zeros that, were they flushed values, they would weigh more than the tolerance; but nothing is near the floor.
    seen = window_of(spread({-16: 1000}, zeros=100_000), passed_through="float16", floor_exponent=-25)
    advice = recommend_loss_scale(session_of({activation("relu"): seen}))
    assert advice.needed is None
    # The scale given would serve the layer even so: 100,000 values of 2^(-25 - k) are then at most a hundredth.
    k = math.log2(advice.recommended)
    assert 100_000 * 2.0 ** (-25 - k) <= 1e-2 * 1.5 * 1000 * 2.0**-16
    assert "not known" in advice.reason


def test_a_run_at_a_large_scale_sees_nearly_everything():
    seen = window_of(through_fp16(logits(), 16), passed_through="float16", floor_exponent=-41)
    advice = recommend_loss_scale(session_of({activation("decoder"): seen}))
    assert (advice.needed, advice.recommended) == (True, 4096.0)


# -- over time --------------------------------------------------------------------------------------------------------


def test_drift_static_takes_the_least_and_dynamic_starts_with_the_first():
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
    # 6 powers of two in the 300 steps between the middles of the first and the last block.
    assert advice.dynamic.growth_interval == 100
    slow = [TimeBlock(i * 1000, i * 1000 + 999, 0, 10 + i) for i in range(3)]
    assert growth_interval(slow) == 1000


@pytest.mark.parametrize(
    ("highest", "expected"), [([18], 2000), ([18, 18], 2000), ([24, 18], 2000), ([18, 19], 2000), ([None, None], 2000)]
)
def test_growth_interval_is_the_default_where_nothing_rises(highest, expected):
    blocks = [TimeBlock(i * 10, i * 10 + 9, 0, top) for i, top in enumerate(highest)]
    assert growth_interval(blocks) == expected


def test_any_number_of_windows_makes_at_most_eight_blocks_in_order():
    windows = [Window(i * 10, i * 10 + 9, 10, {}) for i in range(100)]
    blocks = time_blocks(windows[::-1])
    assert [window for block in blocks for window in block] == windows
    assert len(blocks) == 8
    assert {len(block) for block in blocks} <= {12, 13}
    assert time_blocks([]) == []
    assert len(time_blocks([Window(0, 9, 0, {}), Window(10, 19, 0, {})])) == 1


def test_blocks_without_gradients_are_kept_as_unknown():
    advice = recommend_loss_scale(session_of({weight("w"): logits()}, {weight("w"): spread({}, zeros=5)}))
    assert [block.log2_lowest is None for block in advice.blocks] == [False, True]


def test_a_mean_over_more_samples_is_a_scale_already_in_the_gradients():
    """Batch size and accumulation move the window by log2 N."""
    one = recommend_loss_scale({"decoder": logits()})
    of_eight = recommend_loss_scale({"decoder": logits().shifted(-3)})
    assert (of_eight.lowest, of_eight.highest) == (8 * one.lowest, 8 * one.highest)
    assert of_eight.recommended == 8 * one.recommended
