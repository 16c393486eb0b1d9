"""A healthy session has info findings only; each broken one has the right finding."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from agreeing_reports import analyse
from analysis_sessions import activation, logits, session_of, spread, through_fp16, weight, window_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mpinspect.numeric.exponents import ExponentHistogram, merge
from mpinspect.numeric.formats import FORMATS
from mpinspect.ranges.analysis.ranges import NO_GRADIENT_SEEN
from mpinspect.ranges.kinds import ACTIVATION, KINDS, UPDATE, WEIGHT
from mpinspect.ranges.records import LostFactor, UpdateEffect
from mpinspect.ranges.session import (
    Event,
    Measurement,
    OptimizerRecord,
    Precision,
    Progress,
    ScaleChange,
    ScalerRecord,
    Session,
)
from mpinspect.ranges.windows.tensors import LostUpdates, TensorInfo, TensorKey, TensorWindow
from mpinspect.ranges.windows.window import Window
from mpinspect.reporting.finding import SEVERITIES

FINE = spread({-14: 5000, -12: 20000, -6: 10}, zeros=25000)
DEMO = {
    activation("decoder"): logits(),
    weight("decoder.weight"): spread({-20: 1000, -5: 10}),
    weight("emb.weight"): FINE,
}


def found(report, id):
    return next((finding for finding in report.findings if finding.id == id), None)


def ids(report):
    return {finding.id: finding.severity for finding in report.findings}


# -- sessions with a fault --------------------------------------------------------------------------------------------


def test_the_demo_session_reports_flushed_and_fine_gradients():
    report = analyse(session_of(DEMO, steps=160))
    assert ids(report) == {"gradients-flushed": "warning", "weight-gradients-fine": "info"}
    flushed = found(report, "gradients-flushed")
    assert flushed.layer == "decoder"
    assert flushed.evidence["flushed_fraction"] > 0.8
    assert "would flush 88% of the non-zero elements of the activation gradients of 'decoder'" in flushed.message
    assert "Multiply the loss by 4096" in flushed.fix
    fine = found(report, "weight-gradients-fine")
    assert "The weight gradients are fine" in fine.message
    assert "activation gradients of 'decoder'" in fine.message


def test_layers_are_judged_separately():
    """A large healthy layer does not hide a small layer with flushed gradients."""
    sick = spread({-28: 1000, -24: 100})
    report = analyse(session_of({activation("small"): sick, activation("large"): spread({-5: 10**9})}))
    pooled = next(layer for layer in report.overall if layer.kind == "activation_gradient")
    assert pooled.lost_l1_share.estimate < 1e-6
    assert found(report, "gradients-flushed").layer == "small"


@pytest.mark.parametrize(
    ("scales", "severity"),
    [
        ((), "warning"),
        ((ScaleChange(0, 1.0),), "warning"),
        ((ScaleChange(0, 8.0),), "warning"),
        ((ScaleChange(0, 64.0),), "info"),
        ((ScaleChange(0, 2.0), ScaleChange(5, 2.0**16)), "info"),
        ((ScaleChange(0, 2.0**16), ScaleChange(50, 2.0)), "warning"),
        ((ScaleChange(0, None),), "warning"),
    ],
)
def test_flushed_gradients_are_info_if_the_runs_scale_is_large_enough(scales, severity):
    progress = Progress(100, 100, 0, 100, True, scales=scales)
    report = analyse(session_of(DEMO, steps=100, progress=progress))
    assert found(report, "gradients-flushed").severity == severity


def test_gradients_that_fp16_would_flush_are_info_for_a_run_in_bfloat16():
    seen = window_of(logits(), passed_through="bfloat16")
    assert ids(analyse(session_of({activation("decoder"): seen}))) == {"gradients-flushed": "info"}


def test_gradients_flushed_before_counting_are_reported():
    seen = window_of(through_fp16(logits()), passed_through="float16", floor_exponent=-25)
    report = analyse(session_of({activation("decoder"): seen}))
    finding = found(report, "gradients-already-flushed")
    assert finding.severity == "warning"
    assert "88%" in finding.message
    layer = report.layers[0]
    assert layer.flushed_fraction.estimate == 0.0
    assert layer.already_flushed_fraction.high == pytest.approx(0.879, abs=0.001)


def test_an_overflow_at_scale_1_is_a_warning():
    report = analyse(session_of({activation("fc"): spread({0: 1000, 17: 3})}))
    assert ids(report)["gradients-overflow"] == "warning"
    assert found(report, "gradients-overflow").evidence["max_log2_scale"] == -2
    assert report.loss_scale.recommended < 1


@pytest.mark.parametrize(("scale", "severity"), [(1.0, "warning"), (2.0**-8, "info")])
def test_an_overflow_at_scale_1_is_info_if_the_runs_scale_is_small_enough(scale, severity):
    progress = Progress(100, 100, 0, 100, True, scales=(ScaleChange(0, scale),))
    session = session_of({activation("fc"): spread({0: 1000, 17: 3})}, steps=100, progress=progress)
    finding = found(analyse(session), "gradients-overflow")
    assert finding.severity == severity
    assert ("The run's last loss scale, 2^-8, is small enough." in finding.message) == (severity == "info")
    assert bool(finding.fix) == (severity == "warning")


def test_the_reserve_is_zero_above_an_overflow_of_the_run():
    blocks = [{activation("fc"): spread({-20: 100, peak: 1})} for peak in (-3, -1, -2, -3, -1, -2, -3, -1)]
    free = analyse(session_of(*blocks, steps=4)).loss_scale
    assert free.reserve > 1
    overflow = Event(
        9, 0, "backward", "fc", "activation_gradient", "fc", "inf", loss_scale=2 * free.highest, forward_finite=True
    )
    told = analyse(session_of(*blocks, steps=4, events=(overflow,))).loss_scale
    assert (told.highest, told.reserve) == (free.highest, 0)


def test_updates_of_rounding_noise_are_not_counted_as_lost():
    def lost_in(gradient):
        updates = {
            TensorKey("0.weight", UPDATE): replace(
                window_of(FINE), lost_updates={"float16": LostUpdates(90, 100, True)}
            ),
            TensorKey("0.bias", UPDATE): replace(
                window_of(FINE), lost_updates={"float16": LostUpdates(100, 100, True)}
            ),
        }
        gradients = {weight("0.weight"): spread({-3: 16000}), weight("0.bias"): gradient}
        infos = [TensorInfo(key.name, key.kind, "0", "Linear", shape=(100,)) for key in gradients]
        return found(analyse(session_of({**gradients, **updates}, infos=infos)), "updates-lost")

    assert lost_in(spread({-4: 1000})).layer == "0.bias"
    assert lost_in(spread({-28: 1000})).layer == "0.weight"


def test_the_window_mentions_gradients_that_never_arrived():
    seen, unseen = activation("head"), activation("body")
    infos = [TensorInfo(key.name, key.kind, key.name, "Linear") for key in (seen, unseen)]
    said = str(analyse(session_of({seen: spread({-40: 1000})}, infos=infos)))
    assert "Never seen (Coverage): 1 gradient. The window does not cover them." in " ".join(said.split())


def test_a_tensor_without_a_finite_value_is_named_next_to_the_fitting_formats():
    report = analyse(session_of({activation("a"): spread({-3: 100}), activation("b"): spread({}, nans=12)}))
    said = " ".join(str(report).split())
    assert "activation gradients: range holds the finite ones: float16, bfloat16" in said
    assert "; of 'b' no finite value other than zero was seen" in said


def test_layers_without_a_common_scale_are_named_with_possible_fixes():
    report = analyse(session_of({activation("deep"): spread({-40: 1000}), activation("head"): spread({12: 1000})}))
    finding = found(report, "scale-window-empty")
    assert finding.severity == "warning"
    told = "'deep' needs a loss scale of at least 2^15, but 'head' overflows above 2^1: no one loss scale serves both."
    assert finding.message == f"In FP16 {told}"
    assert finding.evidence["conflicts"][0] == {
        "needs_large": "deep",
        "log2_lowest": 15,
        "needs_small": "head",
        "log2_highest": 1,
    }
    for way_out in ("FP32", "clip", "scale each branch by itself", "BF16"):
        assert way_out in finding.fix


def by_optimizers(*optimizers):
    return Precision(weights={"float32": 10}, autocast=("float16",), optimizers=optimizers)


ADAM = OptimizerRecord("Adam", {"lr": 1e-3, "eps": 1e-8}, {"float32": 10}, {"exp_avg_sq": "float32"})
SGD = OptimizerRecord("SGD", {"lr": 1e-3}, {"float32": 10}, {})


@pytest.mark.parametrize(
    ("exponent", "optimizers", "told"),
    [
        (-28, (ADAM,), True),
        # 2^-26 is above 1e-8.
        (-26, (ADAM,), False),
        (-28, (SGD,), False),
        # It is unknown which optimizer steps these gradients.
        (-28, (ADAM, SGD), False),
        (-28, (), False),
    ],
)
def test_gradients_below_the_optimizers_epsilon_need_a_larger_loss(exponent, optimizers, told):
    damped = "Adam's eps, 1e-08, is above gradients that small and damps their steps in any format"
    precision = by_optimizers(*optimizers)
    at_odds = session_of(
        {activation("deep"): spread({exponent: 1000}), activation("head"): spread({15: 1000})}, precision=precision
    )
    assert (damped in found(analyse(at_odds), "scale-window-empty").fix) is told
    # A run at loss scale 2^(-25 - exponent) flushes gradients up to 2^exponent, so these are zeros.
    silent = {
        key: window_of(histogram, passed_through="float16", floor_exponent=exponent)
        for key, histogram in (
            (weight("deep.weight"), spread({}, zeros=1000)),
            (weight("head.weight"), spread({-3: 1000})),
        )
    }
    scale = 2.0 ** (-25 - exponent)
    progress = Progress(8, 8, 0, 8, True, scales=(ScaleChange(0, scale),))
    finding = found(analyse(session_of(*[silent] * 8, precision=precision, progress=progress)), "gradients-all-zero")
    assert (damped in finding.message) is told
    assert ("compute these modules in FP32, or" in finding.fix) is not told


def test_layers_without_a_common_scale_are_info_for_a_run_in_fp32():
    report = analyse(
        session_of(
            {activation("deep"): spread({-40: 1000}), activation("head"): spread({12: 1000})},
            precision=Precision(weights={"float32": 10}, autocast=("",), outputs=("float32",)),
        )
    )
    finding = found(report, "scale-window-empty")
    assert finding.severity == "info"
    assert finding.message.endswith("The run computes in FP32, which holds them.")
    assert finding.fix == ""
    assert report.verdict.healthy is True


def test_a_measurement_without_its_figures_loses_only_its_diagnosis():
    measurements = (
        Measurement("ties", "", 0, {}, (), "float16"),
        Measurement("accumulation", "fc.weight", 0, {}, (), "bfloat16"),
        Measurement("stale", "fc.weight", 3, {}, ("fc.weight",)),
    )
    report = analyse(session_of({activation("fc"): spread({-40: 1000})}, measurements=measurements))
    assert set(ids(report)) == {"diagnosis-failed", "gradients-stale", "gradients-flushed"}
    failed = [finding.message for finding in report.findings if finding.id == "diagnosis-failed"]
    assert len(failed) == 2
    assert "'router-ties' is not known: its record can't be read (KeyError('fraction'))" in " ".join(failed)


def test_an_unknown_loss_scale_is_the_only_finding():
    progress = Progress(10, 10, 0, 10, True, scale_known=False, scale_unknown_reason="no scaler was given.")
    report = analyse(session_of(DEMO, progress=progress))
    assert ids(report) == {"scale-unknown": "warning"}
    assert not report.loss_scale.available


def test_a_moving_scale_window_is_an_info_finding():
    blocks = [{weight("w"): spread({-3 - 2 * i: 1000})} for i in range(4)]
    report = analyse(session_of(*blocks))
    assert ids(report) == {"scale-window-moves": "info"}
    assert found(report, "scale-window-moves").evidence["powers_of_two"] == 6
    # BF16 has FP32's range and needs no scale.
    assert ids(analyse(session_of(*blocks), "bfloat16")) == {}


# -- healthy sessions: info findings only -----------------------------------------------------------------------------


def lognormal(centre: float, spread_log2: float, n: int, zeros: int, seed: int = 0) -> ExponentHistogram:
    exponents = np.floor(np.random.default_rng(seed).normal(centre, spread_log2, n)).astype(int)
    low = int(exponents.min())
    return ExponentHistogram.from_counts(np.bincount(exponents - low), low, zeros=zeros)


def healthy(zero_share: float) -> dict:
    """Return an image classifier's counts: weight gradients near 2^-10, activation gradients near 2^-15, zeros of ReLUs."""
    n = 200_000
    zeros = int(n * zero_share / (1 - zero_share))
    layers = {weight(f"{i}.weight"): lognormal(-10 - i / 4, 2, n, 0, i) for i in range(6)}
    layers |= {activation(f"{i}"): lognormal(-15 - i / 4, 2.5, n, zeros, 10 + i) for i in range(6)}
    return layers


@pytest.mark.parametrize("zero_share", [0.0, 0.109, 0.67, 0.95])
def test_zeros_in_fp32_are_not_reported_as_flushed(zero_share):
    report = analyse(session_of(healthy(zero_share)))
    assert [finding for finding in report.findings if finding.severity != "info"] == []
    assert (report.loss_scale.needed, report.loss_scale.recommended) == (False, 1.0)


@pytest.mark.parametrize("log2_scale", [0, 3, 16])
def test_a_healthy_network_under_fp16_autocast_has_info_findings_only(log2_scale):
    layers = {
        key: window_of(through_fp16(histogram, log2_scale), passed_through="float16", floor_exponent=-25 - log2_scale)
        for key, histogram in healthy(0.5).items()
    }
    report = analyse(session_of(layers))
    assert [finding for finding in report.findings if finding.severity != "info"] == []
    assert report.loss_scale.needed is not True


def test_many_flushed_elements_of_negligible_sum_are_not_a_finding():
    """Half of the elements are flushed, but their sum is less than a millionth of the total."""
    report = analyse(session_of({activation("pool"): spread({-35: 5000, -12: 5000})}))
    assert report.layers[0].flushed_fraction.estimate == 0.5
    assert report.findings == ()


# -- infinities and NaNs ----------------------------------------------------------------------------------------------


def event(step, phase="backward", **others):
    defaults = {"loss_scale": 2.0**16, "skipped": True, "forward_finite": phase == "backward", "value": "inf"}
    fields = {**defaults, **others}
    return Event(step, 0, phase, "fc2", "activation", "fc2", **fields)


def steps_with(events, steps=100, **others):
    progress = Progress(steps, steps, len(events), steps, True, **others)
    return analyse(session_of({weight("w"): FINE}, progress=progress, events=tuple(events)))


def test_skipped_steps_of_a_dynamic_scaler_are_an_info_finding():
    finding = found(steps_with([event(0), event(1), event(50)]), "non-finite-event")
    assert finding.severity == "info"
    assert "skipped" in finding.message


def test_skips_at_the_start_of_a_dynamic_scaler_are_an_info_finding():
    """A scaler that starts at 2^32 may skip a dozen steps before the first update."""
    opening = [event(step, loss_scale=2.0 ** (32 - step)) for step in range(14)]
    assert found(steps_with(opening, steps=100), "non-finite-event").severity == "info"
    assert found(steps_with(opening, steps=14), "non-finite-event").severity == "info"


def test_frequent_skips_are_a_warning():
    assert found(steps_with([event(step) for step in range(5, 100, 7)]), "non-finite-event").severity == "warning"


@pytest.mark.parametrize(
    ("has_scaler", "fix"), [(True, "begin at a smaller loss scale, such as 8,"), (False, "GradScaler")]
)
def test_a_run_with_a_scaler_is_told_where_to_begin_and_not_to_take_a_scaler(has_scaler, fix):
    scales = tuple(ScaleChange(step, 2.0 ** (16 - index)) for index, step in enumerate(range(86, 100)))
    events = tuple(event(change.step, value="nan", loss_scale=change.scale) for change in scales[:-1])
    precision = Precision(scalers=(ScalerRecord("GradScaler", True, 2.0**16, 2000),) if has_scaler else ())
    progress = Progress(100, 100, len(events), 100, True, scales=scales)
    counts = ExponentHistogram.from_counts([1000], -10, infs=3)
    session = session_of({weight("w"): counts}, progress=progress, events=events, precision=precision)
    finding = found(analyse(session), "non-finite-event")
    assert fix in finding.fix
    assert ("GradScaler" in finding.fix) != has_scaler


@pytest.mark.parametrize(("bursts", "severity"), [([20], "info"), ([20, 45, 70], "warning"), ([86], "warning")])
def test_one_search_for_a_lower_scale_is_not_a_fault_if_it_ended(bursts, severity):
    """Gradients may grow once, as at new data."""
    events = [event(start + more, loss_scale=2.0 ** (16 - more)) for start in bursts for more in range(12)]
    assert found(steps_with(events), "non-finite-event").severity == severity


def test_the_lost_decay_of_each_optimizer_is_reported_once():
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    optimizers = tuple(OptimizerRecord(name, settings, {"bfloat16": 64}) for name in ("AdamW", "Lion"))
    lost = LostFactor(
        step=1, names=("mul", "a.py:3", "step of Lion"), text="bfloat16", elements=64, lost=64, factor=0.999
    )
    session = session_of(
        {weight("w"): FINE}, precision=Precision(optimizers=optimizers), measurements=[lost.measurement()]
    )
    told = [each.evidence.get("optimizer") for each in analyse(session).findings if each.id == "weight-decay-lost"]
    assert sorted(told) == ["AdamW", "Lion"]


def test_steps_skipped_for_the_forward_are_not_ascribed_to_the_backward():
    search = [event(0)]
    later = [event(step, "forward", value="nan", forward_finite=False) for step in range(30, 100)]
    backward = next(
        finding for finding in steps_with([*search, *later]).findings if "The backward was" in finding.message
    )
    assert (backward.severity, backward.evidence["skipped_steps"]) == ("info", 1)


def test_an_event_explained_by_a_diagnosis_is_info_without_a_fix():
    session = steps_with([event(step) for step in range(5)], steps=5)
    assert found(session, "scale-too-high").severity == "error"
    consequence = found(session, "non-finite-event")
    assert (consequence.severity, consequence.fix) == ("info", "")


def test_a_harmless_nan_loss_does_not_explain_a_later_event():
    """All targets of step 5 are ignored: the loss is NaN, its gradients are finite. Step 9 breaks for another reason."""
    ignored = Measurement("examined-argument", step=5, figures={"elements": 4.0}, text="a mean that are all ignored")
    broken = event(9, "forward", value="nan", loss_scale=None, forward_finite=False, skipped=None)
    session = session_of({weight("w"): FINE}, progress=Progress(20, 20, 0, 20, True), events=(broken,))
    report = analyse(replace(session, measurements=(ignored,)))
    assert found(report, "argument-out-of-range").severity == "warning"
    assert found(report, "non-finite-event").severity == "error"


def test_a_loss_scale_that_stays_infinite_is_reported():
    events = [event(step, loss_scale=math.inf) for step in range(5)]
    assert "stays at inf" in found(steps_with(events, steps=5), "scale-too-high").message


def test_a_nan_in_the_forward_is_an_error_that_no_lower_scale_fixes():
    events = [event(step, "forward", value="nan", loss_scale=None, forward_finite=False) for step in range(3, 43)]
    finding = found(steps_with(events), "non-finite-event")
    assert (finding.severity, finding.layer, finding.step) == ("error", "fc2", 3)
    assert (finding.evidence["steps"], finding.evidence["skipped_steps"]) == (40, 40)
    assert "can't help" in finding.message
    assert "new GradScaler" in finding.fix


def test_a_non_finite_forward_is_an_error_without_a_scaler():
    events = [
        event(step, "forward", value="nan", loss_scale=None, forward_finite=False, skipped=None) for step in (3, 4)
    ]
    finding = found(steps_with(events), "non-finite-event")
    assert finding.severity == "error"
    assert "No loss scale repairs a forward" in finding.fix


def test_a_step_on_infinite_gradients_is_an_error_unless_later_forwards_are_finite():
    after = event(8, "forward", value="nan", loss_scale=None, forward_finite=False)
    assert found(steps_with([event(7, skipped=False), after]), "non-finite-event").severity == "error"
    survived = found(steps_with([event(7, skipped=False)]), "non-finite-event")
    assert (survived.severity, survived.step) == ("warning", 7)
    assert "no infinity or NaN reached a weight" in survived.message
    at_the_end = found(steps_with([event(7, skipped=False)], steps=8), "non-finite-event")
    assert at_the_end.severity == "error"
    assert found(steps_with([event(7, skipped=None)]), "non-finite-event").severity == "warning"


def test_a_compiled_model_survives_a_step_only_if_a_later_backward_is_finite():
    """No forward of a compiled model is watched."""

    def severity(last):
        events = [event(step, skipped=False, loss_scale=None, forward_finite=None) for step in range(7, last)]
        report = steps_with(events, steps=20, compiled=("",))
        return found(report, "non-finite-event").severity

    assert (severity(20), severity(15)) == ("error", "warning")


def test_counted_infinities_are_reported_without_a_watch():
    nan = ExponentHistogram.from_counts([5], -3, nans=7, infs=1)
    forward = analyse(session_of({TensorKey("fc", ACTIVATION): nan}))
    assert ids(forward) == {"non-finite-event": "error"}
    assert ids(analyse(session_of({weight("w"): nan}))) == {"non-finite-event": "warning"}


@pytest.mark.parametrize(("skipped", "severity"), [(0, None), (1, "info"), (10, "info"), (11, "warning")])
def test_skipped_steps_without_a_watch_are_reported(skipped, severity):
    progress = Progress(100, 100, skipped, 100, True)
    session = session_of({weight("w"): FINE}, progress=progress)
    assert found(analyse(session), "unwatched-skips") is None
    unwatched = replace(session, info=replace(session.info, watch=False))
    budget = replace(session, progress=replace(progress, watched_steps=40))
    for each, why in ((unwatched, "the watch was off"), (budget, "whose time was limited")):
        finding = found(analyse(each), "unwatched-skips")
        assert (finding and finding.severity) == severity
        if finding:
            assert f"{skipped} of 100 steps were skipped" in finding.message
            assert why in finding.message


def test_skips_explained_by_an_event_are_not_reported_again():
    session = session_of({weight("w"): FINE}, progress=Progress(100, 100, 3, 100, True), events=(event(50),))
    report = analyse(replace(session, info=replace(session.info, watch=False)))
    assert found(report, "unwatched-skips") is None
    assert found(report, "non-finite-event").evidence["skipped_steps"] == 3


def test_findings_are_sorted_by_severity():
    report = analyse(session_of(DEMO, events=(event(3, "forward", forward_finite=False),)))
    severities = [SEVERITIES.index(finding.severity) for finding in report.findings]
    assert severities == sorted(severities, reverse=True)
    assert report.findings[0].severity == "error"


# -- weights, activations, updates, sums --------------------------------------------------------------------------------


def updates(lost, dtype, *, measured=False, **others):
    window = TensorWindow(FINE, 10, lost_updates={"float16": LostUpdates(lost, 100, measured)})
    info = TensorInfo("fc.weight", UPDATE, "fc", "Linear", (10, 10), dtype)
    return analyse(session_of({TensorKey("fc.weight", UPDATE): window}, infos=(info,), **others))


@pytest.mark.parametrize(
    ("lost", "dtype", "measured", "severity"),
    [
        (87, "float16", False, "warning"),
        (87, "float32", True, "warning"),
        (87, "float32", False, "info"),
        (9, "float16", False, "info"),
        (0, "float16", False, None),
    ],
)
def test_lost_updates_are_a_warning_only_if_the_weights_have_that_format(lost, dtype, measured, severity):
    finding = found(updates(lost, dtype, measured=measured), "updates-lost")
    assert (finding.severity if finding else None) == severity
    if severity == "warning":
        assert "87%" in finding.message
        assert "FP32 masters" in finding.fix


@pytest.mark.parametrize(
    ("effects", "severity"),
    [
        ({1: (2.0, 1.97)}, "info"),
        ({1: (2.0, 1.92)}, "info"),
        ({1: (2.0, 1.88)}, "warning"),
        ({1: (-1.0, 1.0)}, "warning"),
        # The second one stands for 900 steps, the first one for 99.
        ({1: (9.0, 9.0), 100: (0.01, 0.0)}, "info"),
        ({1: (9.0, 9.0), 100: (1.0, 0.0)}, "warning"),
    ],
)
def test_lost_updates_that_cost_little_of_the_losss_decrease_are_information(effects, severity):
    records = [UpdateEffect(step=step, exact=exact, rounded=rounded) for step, (exact, rounded) in effects.items()]
    progress = Progress(1000, 1000, 0, 1000, True)
    report = updates(50, "float16", progress=progress, measurements=tuple(each.measurement() for each in records))
    assert found(report, "updates-lost").severity == severity


def test_activations_beyond_the_format_are_a_warning():
    report = analyse(session_of({TensorKey("mlp", ACTIVATION): spread({0: 100, 17: 1})}))
    assert ids(report)["values-overflow"] == "warning"


def test_sums_that_would_overflow_are_an_info_finding():
    # The sum of 65,536 ones per sample overflows FP16 for certain; the sum of 256 ones does not.
    ones = ExponentHistogram.from_counts([655_360], 0, powers_of_two=[655_360])
    few = ExponentHistogram.from_counts([2560], 0, powers_of_two=[2560])
    report = analyse(session_of({TensorKey("a", ACTIVATION): ones, TensorKey("b", ACTIVATION): few}))
    assert ids(report) == {"reductions-overflow": "info"}
    finding = found(report, "reductions-overflow")
    assert finding.evidence["tensors"] == {"a (activation)": ["certain", "certain"]}
    assert finding.evidence["sum_abs"] == 65_536


def test_a_single_square_of_256_overflows():
    # |d| = 256 in a mean squared error: the square is 65,536.
    square = ExponentHistogram.from_counts([10], 8, powers_of_two=[10])
    finding = found(analyse(session_of({TensorKey("d", ACTIVATION): square})), "reductions-overflow")
    assert finding.evidence["tensors"] == {"d (activation)": ["no", "certain"]}


def test_formats_are_judged_by_range():
    report = analyse(session_of({activation("wide"): logits(), weight("narrow"): spread({-8: 100, -5: 100})}))
    verdicts = {(verdict.kind, verdict.format): verdict for verdict in report.formats}
    assert len(verdicts) == 8
    assert verdicts["weight_gradient", "float8_e4m3"].fits
    assert not verdicts["activation_gradient", "float16"].fits
    assert verdicts["activation_gradient", "float16"].worst_layer == "wide"
    assert verdicts["activation_gradient", "bfloat16"].fits
    assert verdicts["activation_gradient", "float8_e5m2"].scaling == "per-tensor"
    huge = analyse(session_of({weight("w"): spread({20: 3})})).formats
    assert [verdict.overflows for verdict in huge] == [True, False, False, False]


# -- coverage -----------------------------------------------------------------------------------------------------------


def test_coverage_lists_tensors_that_never_arrived_with_a_reason():
    infos = (
        TensorInfo("a", "activation_gradient", "a", "Linear"),
        TensorInfo("b", "activation_gradient", "b", "Linear"),
        TensorInfo("c.weight", "weight_gradient", "c", "Linear", (2, 2), "float32", "frozen: requires_grad is False"),
        TensorInfo("d", ACTIVATION, "d", "Linear"),
        TensorInfo("e", UPDATE, "e", "Linear"),
    )
    report = analyse(session_of({activation("a"): FINE}, infos=infos))
    assert (report.coverage.watched, report.coverage.seen) == (5, 1)
    assert report.coverage.never_fired == (
        ("b", "activation_gradient", NO_GRADIENT_SEEN),
        ("c.weight", "weight_gradient", "frozen: requires_grad is False"),
        ("d", "activation", "its module's forward never ran"),
        ("e", "update", "no optimizer step was sampled"),
    )
    assert str(report.coverage) == "1 of 5 watched tensors were seen"
    assert not report.findings
    assert str(analyse(session_of({activation("a"): FINE})).coverage) == "all 1 watched tensors were seen"


def test_completely_frozen_modules_need_no_gradient():
    infos = (
        TensorInfo(
            "body.0.weight", "weight_gradient", "body.0", "Linear", (2, 2), "float32", "frozen: requires_grad is False"
        ),
        TensorInfo("head.weight", "weight_gradient", "head", "Linear", (2, 2), "float32"),
        *(TensorInfo(name, "activation_gradient", name, "ReLU") for name in ("body.0", "body.1", "head", "other")),
    )
    report = analyse(session_of({weight("head.weight"): FINE}, infos=infos))
    reasons = {name: reason for name, _, reason in report.coverage.never_fired}
    frozen = "frozen: nothing in it or before it needs a gradient"
    assert (reasons["body.0"], reasons["body.1"]) == (frozen, frozen)
    assert (reasons["head"], reasons["other"]) == (NO_GRADIENT_SEEN, NO_GRADIENT_SEEN)
    assert not report.findings


@pytest.mark.parametrize("optimizers", [(), (OptimizerRecord("SGD"),)])
def test_parameters_without_a_gradient_are_a_finding_if_no_optimizer_is_known(optimizers):
    infos = [
        TensorInfo(name, "weight_gradient", name[0], "Linear", (2, 2), "float32") for name in ("a.weight", "b.weight")
    ]
    infos += [TensorInfo(name, "activation_gradient", name, "Dropout") for name in ("drop", "blocks")]
    seen = session_of({weight("a.weight"): FINE}, infos=infos)
    report = analyse(replace(seen, precision=Precision(optimizers=optimizers)))
    found = [finding.evidence["names"] for finding in report.findings if finding.id == "never-fired"]
    assert found == ([] if optimizers else [["b.weight"]])


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (Progress(), "no forward ran"),
        (Progress(steps=9, backwards=9), "no step was sampled"),
        (Progress(steps=9, sampled_steps=9), "no backward ran"),
    ],
)
def test_coverage_of_an_empty_session_gives_the_reason(progress, reason):
    watched = (TensorInfo("a", "activation_gradient", "a", "Linear"),)
    report = analyse(Session(watched=watched, progress=progress))
    assert report.coverage.never_fired == (("a", "activation_gradient", reason),)
    assert not report.loss_scale.available


# -- random sessions ----------------------------------------------------------------------------------------------------


def some(strategy, most):
    return st.lists(strategy, max_size=most).map(tuple)


few, kinds = st.integers(0, 9), st.sampled_from(KINDS)
odd_histograms = st.builds(
    lambda counts, low, zeros, infs, nans: ExponentHistogram.from_counts(
        counts, low, zeros=zeros, infs=infs, nans=nans
    ),
    st.lists(st.integers(0, 50), max_size=6),
    st.integers(-1074, 1000),
    few,
    st.integers(0, 2),
    st.integers(0, 2),
)
odd_lost_updates = st.builds(LostUpdates, st.integers(0, 5), st.integers(0, 5))
odd_tensors = st.builds(
    TensorWindow,
    odd_histograms,
    st.integers(0, 5),
    passed_through=st.sampled_from(["float32", "float16", "bfloat16"]),
    floor_exponent=st.none() | st.integers(-160, 5),
    lost_updates=st.dictionaries(st.sampled_from(["float16", "bfloat16"]), odd_lost_updates),
)
odd_infos = st.builds(TensorInfo, st.sampled_from("abc"), kinds, st.sampled_from(["", "a"]), st.just("Linear"))
odd_keys = st.builds(TensorKey, st.sampled_from(["a", "a.bias", ""]), kinds)
odd_scales = st.dictionaries(st.integers(-160, 160), st.integers(1, 3), max_size=2)
odd_windows = st.builds(Window, few, few, st.integers(0, 3), st.dictionaries(odd_keys, odd_tensors), odd_scales)
odd_events = st.builds(
    Event,
    few,
    st.just(0),
    st.sampled_from(["forward", "backward"]),
    st.just("a"),
    kinds,
    st.just("a"),
    st.sampled_from(["inf", "nan"]),
    loss_scale=st.sampled_from([None, 0.0, 1.0, 3.0, 2.0**16, float("inf")]),
    skipped=st.none() | st.booleans(),
    forward_finite=st.none() | st.booleans(),
)
odd_changes = some(st.builds(ScaleChange, few, st.sampled_from([None, 1.0, 2.0**16])), 3)
in_order = odd_changes.map(lambda changes: tuple(sorted(changes, key=lambda change: change.step)))
odd_sessions = st.builds(
    Session,
    watched=some(odd_infos, 4),
    windows=some(odd_windows, 3),
    events=some(odd_events, 3),
    progress=st.builds(Progress, few, few, scale_known=st.booleans(), scales=in_order),
)


def test_an_unknown_scale_and_nan_in_every_gradient_have_a_report():
    report = analyse(
        session_of({weight("a"): spread({-3: 100}, nans=1)}, progress=Progress(10, 10, 0, 10, True, scale_known=False))
    )
    assert "FP16 flushes" in report.loss_scale.reason


@settings(deadline=None, max_examples=60)
@given(odd_sessions, st.sampled_from(sorted(FORMATS)))
def test_every_session_has_a_report(session, name):
    report = analyse(session, FORMATS[name])
    assert report.format == name
    assert all(finding.severity in SEVERITIES for finding in report.findings)
    json.dumps([asdict(finding) for finding in report.findings])
    for layer in report.layers:
        for share in (layer.flushed_fraction, layer.lost_l1_share, layer.already_flushed_fraction):
            if share is not None:
                assert 0 <= share.low <= share.estimate * (1 + 1e-9) + 1e-12
                assert share.estimate <= share.high * (1 + 1e-9) + 1e-12
                assert share.high <= 1 + 1e-9
    if report.loss_scale.available and report.loss_scale.needed is not False:
        assert report.loss_scale.recommended <= report.loss_scale.highest
    assert report.loss_scale.reason


def test_the_empty_session_has_an_empty_report():
    report = analyse(Session())
    assert (report.layers, report.findings, report.events, report.formats, report.overall) == ((), (), (), (), ())
    assert report.loss_scale.reason.startswith("No gradient was seen")


def test_activations_alone_have_ranges_but_no_advice():
    report = analyse(session_of({TensorKey("fc", ACTIVATION): FINE, TensorKey("fc.weight", WEIGHT): FINE}))
    assert not report.loss_scale.available
    assert [layer.flushed_fraction.estimate for layer in report.layers] == [0.0, 0.0]


def test_a_session_of_nans_alone_is_reported():
    nan = ExponentHistogram.from_counts([], 0, nans=100)
    report = analyse(session_of({activation("fc"): nan, weight("fc.weight"): nan}))
    assert "infinite or NaN" in report.loss_scale.reason
    assert ids(report) == {"non-finite-event": "warning"}


def test_the_overall_rows_pool_each_kind():
    report = analyse(session_of(DEMO))
    weights = next(layer for layer in report.overall if layer.kind == "weight_gradient")
    assert weights.histogram == merge(histogram for key, histogram in DEMO.items() if key.kind == "weight_gradient")


def test_tensors_that_were_not_announced_are_reported():
    report = analyse(replace(session_of(DEMO), watched=()))
    assert {layer.name for layer in report.layers} == {key.name for key in DEMO}
