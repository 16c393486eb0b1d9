"""The comparison of two sessions: the compared steps, the first difference, the moved ranges, the sentences."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import sessions

from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges import session as s
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.changed_settings import Change, changed_settings
from mpinspect.ranges.analysis.comparison import RANGE_DIFF_IDS, compare_ranges
from mpinspect.ranges.analysis.parting import LEAST_BEYOND, courses, stretches
from mpinspect.ranges.kinds import ACTIVATION_GRADIENT, WEIGHT_GRADIENT
from mpinspect.ranges.report.comparison import headline
from mpinspect.ranges.windows.tensors import TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window, merge_windows

LAYER, HEAD = TensorKey("body.weight", WEIGHT_GRADIENT), TensorKey("head", ACTIVATION_GRADIENT)
ELEMENTS = 4096


def drawn(centre, seed, elements=ELEMENTS, zero=0.0):
    """Return counts of ``elements`` random values around 2^centre; ``zero`` is the share of zeros."""
    exponents = np.random.default_rng(seed).normal(centre, 2.0, elements).round().astype(int)
    zeros = round(zero * elements)
    counts = np.bincount(exponents[zeros:] + 200)
    return ExponentHistogram.from_counts(counts, -200, zeros=zeros)


def window(first, last, tensors, sampled=None):
    counted = {key: TensorWindow(histogram, last - first + 1) for key, histogram in tensors.items()}
    return Window(first, last, sampled or last - first + 1, counted)


def run(windows, **fields):
    """Return a session of these windows, with all their tensors as watched."""
    keys = dict.fromkeys(key for each in windows for key in each.tensors)
    watched = tuple(TensorInfo(key.name, key.kind, key.name, "Linear") for key in keys)
    steps = max((each.last_step for each in windows), default=-1) + 1
    progress = s.Progress(steps, steps, 0, steps, True, True, "", (s.ScaleChange(0, 1.0),))
    return dataclasses.replace(
        s.Session(s.RunInfo("Net", kinds=(WEIGHT_GRADIENT,)), watched, tuple(windows), progress=progress), **fields
    )


def training(seed=0, steps=24, flushed_from=None, centre=-12):
    """Return a run with a window per step; from step ``flushed_from``, a third of the head's gradients is zero."""
    return run(
        [
            window(
                step,
                step,
                {
                    LAYER: drawn(centre, 1000 * seed + step),
                    HEAD: drawn(
                        -20,
                        1000 * seed + step + 500,
                        zero=1 / 3 if flushed_from is not None and step >= flushed_from else 0,
                    ),
                },
            )
            for step in range(steps)
        ]
    )


def compared(first, second):
    return compare_ranges(analyse(first), analyse(second))


def ids(diff):
    return {finding.id for finding in diff.differences}


# -- which steps are compared -------------------------------------------------------------------------------------------


def spans(*ends):
    """Return a run with a window from each of these steps up to the next."""
    return run([window(a, b - 1, {LAYER: drawn(-12, a)}) for a, b in pairwise(ends)])


def test_windows_are_merged_until_both_runs_cover_the_same_steps():
    first, second = spans(0, 2, 4, 6, 9, 12), spans(0, 3, 4, 7, 8, 12)
    found = stretches(first, second)
    assert [(each.first_step, each.last_step, each.same_steps) for each in found] == [(0, 3, True), (4, 11, True)]
    assert [each.first.sampled_steps for each in found] == [4, 8]
    total = merge_windows(*first.windows).tensors[LAYER].histogram
    assert merge_windows(*(each.first for each in found)).tensors[LAYER].histogram == total


def test_steps_of_a_single_run_are_not_compared():
    assert [str(each) for each in stretches(spans(0, 2, 4), spans(0, 2, 4, 6, 8))] == ["steps 0-1", "steps 2-3"]
    assert stretches(spans(0, 2), spans(2, 4)) == stretches(run([]), spans(0, 2)) == ()
    # The longer run's only window has 97 steps of its own.
    assert stretches(spans(0, 3), spans(0, 100)) == ()


def test_two_runs_sampled_the_same_steps_only_under_the_same_rule():
    def sampled(number, watched=None):
        windows = [window(0, 0, {LAYER: drawn(-12, 1)}), window(10, 90, {LAYER: drawn(-12, 2)}, number)]
        session = run(windows, info=s.RunInfo("Net", every=10))
        return dataclasses.replace(session, progress=dataclasses.replace(session.progress, watched_steps=watched))

    def same(first, second):
        return [each.same_steps for each in stretches(first, second)]

    assert same(sampled(9), sampled(9)) == [True, True]
    assert same(sampled(9), sampled(7)) == [True, False]
    # With a budget the clock chooses the steps. A window of a single step is always comparable.
    assert same(sampled(9, watched=50), sampled(9)) == [True, False]


# -- equal, different, moved --------------------------------------------------------------------------------------------


def test_a_run_has_no_difference_from_itself():
    diff = compared(training(), training())
    assert diff.differs is diff.moved is None
    assert diff.findings == diff.gone == diff.settings == ()
    assert {(change.elsewhere_fraction, change.beyond_fraction) for change in diff.layers} == {(0.0, 0.0)}
    assert (
        headline(diff)
        == "The ranges do not differ: the counts of 2 tensors are equal in all 24 steps counted of steps 0-23."
    )


def test_a_difference_of_one_element_is_not_a_move():
    first = training()
    windows = list(first.windows)
    changed = drawn(-12, 7)
    windows[7] = window(
        7, 7, {LAYER: ExponentHistogram.from_counts([1], -13) + changed, HEAD: windows[7].tensors[HEAD].histogram}
    )
    diff = compared(first, run(windows))
    assert diff.differs is not None
    assert (diff.differs.first_step, diff.differs.last_step, diff.differs.name) == (7, 7, "body.weight")
    assert (diff.differs.tensors, diff.moved) == (1, None)
    assert ids(diff) == {"runs-part"}
    assert headline(diff).startswith("No meaningful change: the counts differ from step 7 on")


def test_equality_includes_powers_of_two_and_extremes():
    plain = ExponentHistogram.from_counts([5], -3)
    for other in (
        ExponentHistogram.from_counts([5], -3, powers_of_two=[1]),
        ExponentHistogram.from_counts([5], -3, max_abs=0.24),
    ):
        diff = compared(run([window(0, 0, {LAYER: plain})]), run([window(0, 0, {LAYER: other})]))
        assert diff.differs is not None
        assert diff.differs.elsewhere_fraction == 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_another_seed_causes_no_move(seed):
    diff = compared(training(), training(seed))
    assert diff.differs is not None
    assert diff.differs.first_step == 0
    assert diff.moved is None
    assert max(change.beyond_fraction for change in diff.layers) < LEAST_BEYOND / 5


def test_random_differences_of_small_tensors_are_not_a_move():
    """With 64 elements and another seed, more than a tenth of the elements have other exponents."""
    first, second = (
        run([window(step, step, {LAYER: drawn(-12, seed + step, 64)}) for step in range(20)]) for seed in (0, 100)
    )
    diff = compared(first, second)
    assert diff.layers[0].elsewhere_fraction > 0.1
    assert diff.moved is None


def test_flushed_gradients_are_reported_from_their_first_step_for_any_seed():
    for seed in (0, 3):
        diff = compared(training(), training(seed, flushed_from=9))
        assert diff.moved is not None
        assert (diff.moved.first_step, diff.moved.last_step, diff.moved.name) == (9, 9, "head")
        assert diff.moved.zeros_fraction == (0.0, pytest.approx(1 / 3, abs=1e-3))
        assert diff.layers[0].name == "head"
        assert diff.layers[0].moved_from == (9, 9)
        # In 15 of 24 steps a third of the elements is zero.
        assert diff.layers[0].elsewhere_fraction == pytest.approx(15 / 24 / 3, abs=0.05)
        assert {"runs-part", "layers-moved"} <= ids(diff)
        assert headline(diff).startswith("They part at step 9: 2")
        assert "0% of them zero in A, 21% in B" in headline(diff)


def test_a_shift_of_the_range_is_found_despite_a_common_drift():
    def drifting(offset):
        return run([window(step, step, {LAYER: drawn(-12 - step / 4 + offset, step)}) for step in range(24)])

    assert compared(drifting(0), drifting(0.02)).moved is None
    moved = compared(drifting(0), drifting(4)).moved
    assert moved is not None
    assert moved.first_step == 0


def test_a_single_infinity_is_a_move():
    first = training()
    windows = list(first.windows)
    broken = windows[5].tensors[LAYER].histogram + ExponentHistogram.from_counts([], 0, infs=1)
    windows[5] = window(5, 5, {LAYER: broken, HEAD: windows[5].tensors[HEAD].histogram})
    for pair in ((first, run(windows)), (run(windows), first)):
        moved = compared(*pair).moved
        assert moved is not None
        assert (moved.first_step, moved.name, moved.tensors) == (5, "body.weight", 1)


def test_a_tensor_missing_from_one_runs_step_is_a_difference():
    first = training(steps=6)
    windows = [
        dataclasses.replace(each, tensors={LAYER: each.tensors[LAYER]} if each.first_step == 3 else each.tensors)
        for each in first.windows
    ]
    diff = compared(first, run(windows))
    assert diff.differs is not None
    assert (diff.differs.first_step, diff.differs.name, diff.moved) == (3, "head", None)


def test_comparing_many_tensors_in_batches_finds_the_moved_one():
    keys = [TensorKey(f"layer.{number}.weight", WEIGHT_GRADIENT) for number in range(300)]
    first = run([window(0, 0, {key: drawn(-12, 1) for key in keys})])
    second = run([window(0, 0, {key: drawn(-12 if key != keys[-1] else -2, 1) for key in keys})])
    found = courses(stretches(first, second), keys)
    assert [key for key, course in found.items() if course.moved is not None] == [keys[-1]]
    assert list(found) == keys


# -- sentences ----------------------------------------------------------------------------------------------------------


def test_different_settings_are_listed_unless_unknown():
    ledger = s.Precision({"float32": 9}, {"float32": 9}, ("",), ("float32",), ("float32",))
    adam = s.OptimizerRecord("Adam", {"lr": 1e-3, "eps": 1e-8}, {"float32": 9}, {"exp_avg": "float32"})
    first = run([], precision=dataclasses.replace(ledger, optimizers=(adam,)))
    second = run(
        [],
        info=s.RunInfo("Net", kinds=(WEIGHT_GRADIENT,), every=10, versions={"torch": "2.13"}),
        precision=dataclasses.replace(
            ledger,
            autocast=("float16",),
            optimizers=(dataclasses.replace(adam, settings={"lr": 3e-3, "eps": 1e-8}),),
            scalers=(s.ScalerRecord("GradScaler", True, 65536.0, 2000.0), s.ScalerRecord("GradScaler", False)),
        ),
    )
    assert list(changed_settings(first, second)) == [
        Change("computes in", "FP32", "FP16"),
        Change("autocast", "none", "FP16"),
        Change("optimizer lr", "0.001", "0.003"),
        Change("scaler", "-", "GradScaler"),
        Change("every", "1", "10"),
        Change("torch", "-", "2.13"),
    ]
    # The states of an optimizer that has not stepped are unseen, not another setting.
    unseen = dataclasses.replace(ledger, gradients={}, optimizers=(dataclasses.replace(adam, states={}),))
    assert list(changed_settings(first, run([], precision=unseen))) == []
    # Without a ledger the precision is unknown.
    assert [each.name for each in changed_settings(run([]), second)] == ["every", "torch"]


def test_the_headline_lists_settings_that_made_no_difference():
    first = training(steps=4)
    diff = compared(first, dataclasses.replace(first, info=dataclasses.replace(first.info, versions={"torch": "2.13"})))
    assert headline(diff).endswith("are equal in all 4 steps counted of steps 0-3; other settings: torch.")


def test_only_parameters_of_both_runs_are_compared_by_shape():
    info = TensorInfo("a.weight", WEIGHT_GRADIENT, "a", "Linear", (3, 5))
    first = run([], watched=(info,))
    second = run([], watched=(dataclasses.replace(info, shape=(3, 6)), dataclasses.replace(info, name="b.weight")))
    assert list(changed_settings(first, second)) == [Change("shape of a.weight", "3x5", "3x6")]


def test_layers_of_a_single_run_are_listed():
    other = TensorKey("extra.weight", WEIGHT_GRADIENT)
    diff = compared(
        run([window(0, 0, {LAYER: drawn(-12, 0), HEAD: drawn(-9, 1)})]),
        run([window(0, 0, {LAYER: drawn(-12, 0), other: drawn(-9, 1)})]),
    )
    assert (diff.only_first, diff.only_second) == ((HEAD,), (other,))
    assert ids(diff) == {"layers-differ"}
    assert (
        headline(diff)
        == "The ranges do not differ: the counts of 1 tensor are equal in step 0; 2 tensors in one run alone."
    )
    assert [change.name for change in diff.layers] == [LAYER.name]


def test_the_headline_begins_with_a_harmful_event_of_a_single_run():
    event = dataclasses.replace(sessions.culprit(), step=4, skipped=False)
    first, second = training(), dataclasses.replace(training(flushed_from=9), events=(event,))
    diff = compared(first, second)
    assert diff.events_only_second == (event,)
    assert headline(diff).startswith("B alone is not healthy: step 4, micro-batch 1, backward, 'decoder.3.attn'")
    assert [f.severity for f in diff.differences if f.id == "events-differ"] == ["warning"]
    # In the opposite order B is the healthy run.
    back = compared(second, first)
    assert back.events_only_first == (event,)
    assert [f.severity for f in back.differences if f.id == "events-differ"] == ["info"]
    assert headline(back).startswith("A alone is not healthy: step 4, micro-batch 1, backward, 'decoder.3.attn'")
    assert "They part" not in headline(back)
    # A later event does not replace the first difference.
    late = dataclasses.replace(second, events=(dataclasses.replace(event, step=20),))
    both = compared(first, late)
    assert headline(both).startswith("B alone is not healthy: step 20, ")
    assert "They part at step 9: " in headline(both)
    assert headline(compared(second, late)).startswith("Neither is healthy. A: step 4, ")
    assert "non-finite-event" in {finding.id for finding in back.gone}
    # Events that both runs have are not differences.
    assert not compared(second, second).findings


def test_loss_scales_are_compared_in_the_steps_of_both_runs():
    def scaled(*changes, steps=24):
        made = training(steps=steps)
        scales = tuple(s.ScaleChange(*change) for change in changes)
        return dataclasses.replace(made, progress=dataclasses.replace(made.progress, scales=scales))

    first = scaled((0, 65536.0), (7, 32768.0))
    assert compared(first, scaled((0, 65536.0), (9, 32768.0))).scales_part == (7, 32768.0, 65536.0)
    assert compared(first, first).scales_part is None
    assert compared(first, scaled((0, 65536.0), steps=5)).scales_part is None


def test_the_window_of_safe_scales_moves_with_the_gradients():
    diff = compared(training(), training(centre=-2))
    (found,) = [finding for finding in diff.differences if finding.id == "scale-window-moved"]
    assert found.severity == "info"
    assert found.evidence["first"][1] > 4 * found.evidence["second"][1]


def test_runs_without_common_steps_are_not_compared():
    diff = compared(spans(0, 2), spans(2, 4))
    assert ids(diff) == {"steps-not-shared", "settings-differ"}
    assert diff.layers == ()
    assert headline(diff) == "Whether they part is not known: no step was counted in both."


def test_a_finding_is_new_if_absent_or_milder_in_the_first_run():
    diff = compared(training(), training(flushed_from=0))
    assert {finding.id for finding in diff.differences} <= set(RANGE_DIFF_IDS)
    report = analyse(training())
    finding = sessions.report_by_hand(sessions.word_model()).findings[0]
    mild, grave = (dataclasses.replace(finding, severity=name) for name in ("info", "error"))
    one, other = (dataclasses.replace(report, findings=(each,)) for each in (mild, grave))
    assert (compare_ranges(one, other).new, compare_ranges(one, other).gone) == ((grave,), ())
    assert (compare_ranges(other, one).new, compare_ranges(other, one).gone) == ((), (grave,))
    assert headline(compare_ranges(one, other)).startswith("B alone is not healthy: ")
