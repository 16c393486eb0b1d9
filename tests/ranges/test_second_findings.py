"""Findings on the step that was computed twice: severities, fixes and what they explain."""

from dataclasses import replace

import pytest
import torch
from agreeing_reports import analyse
from analysis_sessions import session_of, spread, weight
from trainings import cpu_scaler, inspected

from mpinspect.ranges.records import (
    BEFORE_STEPS,
    AbsorbedOperand,
    AmplifiedError,
    BornInfinite,
    BrokenAlike,
    BrokenInFP32,
    BrokenState,
    BrokenWeights,
    CalledLines,
    CastToFP8,
    ChangedBeforeStep,
    ChangedChoices,
    ChangedIntegers,
    ExaminedArgument,
    ExaminedBatch,
    ExaminedMask,
    ExaminedTarget,
    FrozenBuffer,
    GradientsError,
    LostSum,
    MixedPowers,
    PreparedError,
    ReadNumber,
    RoundedArgument,
    RoundedBound,
    SaturatedCast,
    StatesCast,
    StuckNumber,
    Ties,
    WeightGrowth,
)
from mpinspect.ranges.session import Event, OptimizerRecord, Precision, Progress, ScalerRecord

FINE = spread({-3: 1000})
PLACE = ("add", "train.py:7", "forward")
FP16 = Precision({"float32": 10}, autocast=("float16",), scalers=(ScalerRecord("GradScaler", True, 64.0, 2000.0),))


def session_with(*measurements, **others):
    """Return a session of 20 steps with these measurements, one layer and the other fields."""
    others = {"progress": Progress(20, 20, 0, 20, True), **others}
    return session_of({weight("w"): FINE}, measurements=measurements, **others)


def findings(*records, **others):
    """Return the findings by id."""
    session = session_with(*(each.measurement() for each in records), **others)
    return {finding.id: finding for finding in analyse(session).findings}


def finding_at(source, record, **others):
    """Return the first finding of a record in a line of the script."""
    stored = replace(record.measurement(), sources={record.names[1]: source})
    return analyse(session_with(stored, **others)).findings[0]


def born(operator, largest, *origin, line="train.py:7", phase="forward", name="", step=5, **figures):
    figures = {"elements": 3, "of": 4, **figures}
    names = (operator, line, phase, *origin)
    return BornInfinite(name=name, step=step, names=names, text="float16", largest=largest, **figures)


def amplified(operator, before, after, *origin, line="train.py:9", text="bfloat16", step=1, **figures):
    names = (operator, line, "forward", *origin)
    return AmplifiedError(step=step, names=names, text=text, before=before, after=after, **figures)


def broken(step, what="activation", **others):
    fields = {"loss_scale": 64.0, "skipped": True, "forward_finite": False, "gradients_finite": False, **others}
    return Event(step, 0, "forward", "head", what, "head", "inf", **fields)


def absorbed(**figures):
    return AbsorbedOperand(name="blocks.1", step=1, names=PLACE, text="bfloat16", error=0.9, unchanged=0.9, **figures)


@pytest.mark.parametrize(
    ("record", "severity"),
    [
        (absorbed(size=1.0), "warning"),
        (absorbed(), "warning"),
        # A branch that begins near zero, unless the gradients are affected.
        (absorbed(size=1e-3), "info"),
        (absorbed(size=1e-3, gradients_error=0.5), "warning"),
    ],
)
def test_an_absorbed_branch_near_zero_is_information(record, severity):
    finding = findings(record)["addition-changes-nothing"]
    assert finding.severity == severity
    assert bool(finding.fix) is (severity == "warning")


def test_an_absorbed_operand_is_not_a_cause_where_another_modules_difference_is():
    difference = amplified("add", 0.001, 0.9, line="train.py:7", gradients_error=1.0)
    assert findings(absorbed(size=1e-3, gradients_error=1.0), difference)["addition-changes-nothing"].severity == "info"
    from_it = replace(difference, names=(*PLACE, "w", "add", "train.py:5", "blocks.1", "bfloat16"))
    found = findings(absorbed(size=1e-3, gradients_error=1.0), from_it)
    assert found["addition-changes-nothing"].severity == "warning"


@pytest.mark.parametrize(
    ("record", "severity"),
    [
        # An inner loop of an optimiser by hand, in the loop; a model's branches that begin near zero; a sum of many terms.
        (replace(absorbed(size=1e-3, times=15), name=""), "warning"),
        (absorbed(size=1e-3, times=15), "info"),
        (absorbed(size=1e-3, times=700), "warning"),
    ],
)
def test_a_running_sum_of_small_terms_is_a_fault_unless_a_model_has_so_few_layers(record, severity):
    assert findings(record)["addition-changes-nothing"].severity == severity


def test_a_sum_that_stops_growing_has_its_own_fix():
    finding = findings(absorbed(size=1.0, times=700))["addition-changes-nothing"]
    assert "700 additions in BF16 to one sum lose 90% of their terms" in finding.message
    assert "total = total.float()" in finding.code


def test_the_code_begins_with_the_line_of_the_script():
    line = "x = x + self.branch(x)"
    finding = finding_at(line, absorbed(size=1.0))
    first, *more = finding.code.splitlines()
    assert first == f"# train.py:7: {line}"
    assert more[-2:] == ["b = self.branch(x)", "x = x.float() + b.float()"]
    assert finding.evidence["source"] == line
    # A finding that asks for no change has no code.
    finding = finding_at(line, absorbed(size=1e-3))
    assert (finding.code, finding.evidence["source"]) == ("", line)


def test_the_line_stays_one_line_of_the_code():
    record = replace(absorbed(size=1.0), names=("add", "a\nb.py:7", "forward"))
    code = finding_at("x = '\x1b\u2028'", record).code
    assert code.splitlines()[0] == r"# a\nb.py:7: x = '\x1b\u2028'"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("gap = times[1:] - times[:-1]", "gap = (times[1:] - times[:-1]).float()"),
        ("gap = times.diff(dim=1)", "gap = times.diff(dim=1).float()"),
        # A cast in the line would come before the subtraction.
        ("gap = times.float().diff(dim=1)", "difference = (x - y).float()"),
        ("return later - now", "difference = (x - y).float()"),
        ("gap = later - (", "difference = (x - y).float()"),
    ],
)
def test_a_difference_of_large_numbers_is_cast_in_the_scripts_own_line(source, code):
    large = amplified("add", 0.0, 1.0, text="float32", largest=1.7e9, unit=128.0, typical=128.0)
    assert finding_at(source, large).code.splitlines()[-1] == code


def test_both_lines_of_an_error_are_shown_in_the_order_of_the_computation():
    record = amplified("sub", 0.01, 2.0, "w", "add", "train.py:5", "value", "bfloat16", gradients_error=0.5)
    sources = {"train.py:9": "y = x - 1000", "train.py:5": "x = 1000 + z"}
    code = analyse(session_with(replace(record.measurement(), sources=sources))).findings[0].code
    assert code.splitlines()[:2] == ["# train.py:5: x = 1000 + z", "# train.py:9: y = x - 1000"]


def test_an_operator_that_enlarges_an_error_which_makes_the_gradients_useless_is_a_warning():
    origin = ("out.bias", "cumsum", "ssm.py:23", "", "bfloat16")
    raised = amplified("exp", 0.004, 0.132, *origin, line="ssm.py:25", step=101, gradients_error=4.6)
    found = findings(raised)["result-is-rounding-error"]
    assert (found.severity, found.step) == ("warning", 101)
    assert "by 33" in found.message
    assert "mostly" not in found.message


def test_a_result_that_is_only_error_began_in_the_first_such_step():
    began = amplified("add", 0.003, 1.2, gradients_error=1.0)
    later = replace(began, step=101, after=6.7)
    assert findings(replace(began, after=0.4, step=0), began, later)["result-is-rounding-error"].step == 1


@pytest.mark.parametrize(
    ("devices", "argument"),
    [
        ("cuda (NVIDIA H100 80GB HBM3)", '"cuda"'),
        ("cuda (A), cuda (B)", '"cuda"'),
        ("cpu", '"cpu"'),
        ("cuda (A), cpu", "device_type"),
        ("", "device_type"),
    ],
)
def test_the_code_names_the_device_type_of_the_run(devices, argument):
    overflow = born("mul", 1e6, name="head", step=7, elements=1, of=64)
    session = session_with(overflow.measurement(), precision=FP16, events=(broken(7),))
    report = analyse(replace(session, info=replace(session.info, devices=devices)))
    assert f"with torch.autocast({argument}, enabled=False):" in report.findings[0].code


def alike():
    return BrokenAlike(step=7, names=("div", "train.py:7", "forward"), text="float16", elements=1, of=64)


def test_an_operator_that_breaks_in_fp32_too_is_the_cause_of_skipped_steps():
    found = findings(alike(), precision=FP16, events=tuple(map(broken, (4, 7, 11))))
    cause = found["breaks-in-fp32-too"]
    assert (cause.severity, cause.step, cause.layer) == ("error", 4, "head")
    assert "In train.py:7, div is infinite or NaN in 1 element" in cause.message
    assert "train.py:7" in cause.fix
    assert "new GradScaler" in cause.fix
    assert found["non-finite-event"].severity == "info"


@pytest.mark.parametrize(
    ("source", "tensor"),
    [
        ("loss = (loss_fn(model(x)) / weight[rows]).mean()", "weight[rows]"),
        # Which of several divisions it is, is not known; nor can a sum be followed by a method.
        ("loss = a / b / c", ""),
        ("loss = a / (b + c)", ""),
        ("", ""),
    ],
)
def test_the_operand_that_was_not_finite_is_named_as_in_the_line(source, tensor):
    stored = replace(replace(alike(), operand=1, given=3).measurement(), sources={"train.py:7": source})
    session = session_with(stored, precision=FP16, events=(broken(4),))
    (cause,) = (each for each in analyse(session).findings if each.id == "breaks-in-fp32-too")
    assert (f"takes {tensor}, which is not finite" in cause.message) == bool(tensor)
    assert (f"Correct {tensor}, which holds 3 infinite or NaN values." in cause.fix) == bool(tensor)
    assert (f"print((~{tensor}.isfinite())" in cause.code) == bool(tensor)
    compile(cause.code, "fix", "exec")


def test_a_cause_in_the_data_comes_before_the_operator_that_it_breaks():
    examined = ExaminedArgument(name="head", step=4, text="the logarithm of 0", elements=1)
    assert "breaks-in-fp32-too" not in findings(alike(), examined, precision=FP16, events=(broken(4),))


def test_without_a_broken_forward_it_is_not_reported():
    assert "breaks-in-fp32-too" not in findings(alike(), precision=FP16)


def test_a_difference_that_leads_to_a_nan_explains_the_argument_out_of_range():
    difference = amplified("sub", 0.001, 2.5, "", line="train.py:6", text="float16", step=5, name="head")
    made = born("rsqrt", 0, name="head")
    examined = ExaminedArgument(name="head", step=4, text="1 / sqrt of zero or less", elements=3)
    found = findings(difference, made, examined, precision=FP16, events=(broken(4), broken(5)))
    cause = found["result-is-rounding-error"]
    assert (cause.severity, cause.step) == ("error", 4)
    assert "In step 5, in 'head' (train.py:6), a difference leaves mostly rounding error" in cause.message
    assert "From there rsqrt in 'head' (train.py:7) becomes infinite or NaN in 3 elements" in cause.message
    assert found["argument-out-of-range"].severity == "info"
    assert findings(difference)["result-is-rounding-error"].severity == "info"


def of_backward(step, loss_scale):
    fields = {"loss_scale": loss_scale, "skipped": True, "forward_finite": True, "gradients_finite": False}
    return Event(step, 0, "backward", "head", "activation_gradient", "head", "nan", **fields)


def test_a_backward_that_overflows_at_any_loss_scale_is_named_by_its_operator():
    overflow = born("mul", 1e5, phase="backward", name="head", step=7)
    high, low = of_backward(3, 512.0), of_backward(7, 2.0**-9)
    cause = findings(overflow, precision=FP16, events=(high, low))["overflow-in-operator"]
    assert (cause.severity, cause.step, cause.layer) == ("error", 3, "head")
    assert "in the backward of step 3, in 'head', and recurred at far lower loss scales" in cause.message
    assert "In the backward of 'head' (train.py:7), the gradient of mul overflows FP16" in cause.message
    # At this step's scale the overflow may be the scale's.
    assert "overflow-in-operator" not in findings(overflow, precision=FP16, events=(replace(high, step=7),))


def test_states_that_a_load_cast_explain_weights_that_explode():
    cast = StatesCast(names=("Adam", "train.py:3", "exp_avg_sq"), text="float32 float16")
    growth = WeightGrowth(name="head.weight", step=2, ratio=17.0, began=1.0, elements=10.0, loss_ratio=1e3, lr=0.002)
    found = findings(cast, growth)
    assert [found[id].severity for id in ("states-cast-by-loading", "weights-exploded")] == ["error", "info"]
    # Weights that began small grow by one learning rate a step.
    for others in ((), (replace(growth, lr=2.0),)):
        assert findings(cast, *others)["states-cast-by-loading"].severity == "warning"


@pytest.mark.parametrize("follows", [True, False])
def test_an_overflow_of_a_gradient_in_the_loss_is_the_scalers_search_only_if_it_follows_the_scale(follows):
    steps = [(step, 2.0 ** (22 - step)) for step in range(1, 4)]
    overflows = [
        born("_to_copy", scale if follows else 1e6 * (1 + step), phase="backward", step=step) for step, scale in steps
    ]
    events = tuple(replace(of_backward(step, scale), forward_finite=False) for step, scale in steps)
    found = findings(*overflows, precision=FP16, events=events)
    assert ("overflow-in-operator" in found) is not follows
    assert found["non-finite-event"].severity == "info"


def test_a_backward_that_breaks_at_every_loss_scale_asks_for_no_other_scale():
    events = tuple(of_backward(step, 512.0 / 2**step) for step in range(20))
    found = findings(precision=FP16, events=events)
    finding = found["non-finite-event"]
    assert "at a loss scale of 0.000977 either: a still lower one is unlikely to help" in finding.message
    assert "initial-scale-too-high" not in found
    assert "Look at the backward of 'head'" in finding.fix


def test_a_zero_that_16_bits_made_explains_the_division_by_it():
    examined = ExaminedArgument(name="head", step=4, text="a division by zero", elements=3)
    found = findings(born("div", 0, name="head"), examined, precision=FP16, events=(broken(4), broken(5)))
    cause = found["input-rounded-away"]
    assert (cause.severity, cause.step) == ("error", 4)
    assert "an earlier operator had rounded away the value" in cause.message
    assert "epsilon" in cause.fix
    assert "overflow-in-operator" not in found
    assert found["argument-out-of-range"].severity == "info"


def test_an_argument_out_of_range_has_the_line_of_the_second_computation():
    overflow = born("exp", 1e5)
    examined = ExaminedArgument(step=4, text="exp of a number too large for its result", elements=3)
    found = findings(overflow, examined, precision=FP16, events=(broken(4), broken(5)))
    assert "exp of a number too large for its result (train.py:7, 3 elements)" in found["argument-out-of-range"].message
    assert "overflow-in-operator" not in found
    assert "train.py:7" not in findings(overflow, logarithm(), events=(broken(4),))["argument-out-of-range"].message


def test_further_lines_with_the_same_fault_are_named():
    exps = [
        born("exp", 1e5, ""),
        born("exp", 1e5, "", line="train.py:9"),
        born("exp", 1e5, "", line="train.py:12", phase="backward"),
        born("exp", 1e5, "", "mul", "train.py:13", "", "float16", line="train.py:14"),
    ]
    told = {"precision": FP16, "events": (broken(4), broken(5))}
    overflow = findings(*exps, **told)["overflow-in-operator"]
    assert "In train.py:7, exp overflows" in overflow.message
    assert "It overflows in train.py:9 and train.py:14, too." in overflow.message
    examined = ExaminedArgument(step=4, text="exp of a number too large for its result", elements=3)
    message = findings(*exps, examined, **told)["argument-out-of-range"].message
    assert "(train.py:7, 3 elements)" in message
    assert "The same operation is out of range in train.py:9 and train.py:14, too." in message
    assert ", too." not in findings(exps[0], examined, **told)["argument-out-of-range"].message


def logarithm(**figures):
    return ExaminedArgument(step=4, text="a logarithm of zero", elements=3, **figures)


@pytest.mark.parametrize(
    ("lines", "figures", "line"),
    [
        (("train.py:7", "train.py:9"), {"call": 0, "calls": 2}, "train.py:7, "),
        (("train.py:7", "train.py:9"), {"call": 1, "calls": 2}, "train.py:9, "),
        # Another number of calls: which is which is not known. A few lines are all named.
        (("train.py:7", "train.py:9"), {"call": 1, "calls": 3}, "train.py:7 or train.py:9, "),
        (("train.py:7", "train.py:7"), {"call": 1, "calls": 3}, "train.py:7, "),
        (("train.py:7", "train.py:9"), {}, "train.py:7 or train.py:9, "),
        (("train.py:7", "train.py:9", "train.py:8", "train.py:1"), {}, ""),
    ],
)
def test_an_operation_has_the_line_of_its_call_in_an_earlier_step(lines, figures, line):
    called = [CalledLines(step=1, names=lines, text="log"), CalledLines(step=1, names=("train.py:3",), text="exp")]
    message = findings(*called, logarithm(**figures), events=(broken(4),))["argument-out-of-range"].message
    assert f"computes a logarithm of zero ({line}3 elements)" in message


@pytest.mark.parametrize(
    ("what", "module", "place"),
    [("loss", "", "the loss"), ("activation", "", "the model itself"), ("activation", "head", "'head'")],
)
def test_the_place_of_the_first_event_is_named_as_in_the_event(what, module, place):
    first = replace(broken(4, what), module=module)
    assert first.place == place
    overflow = born("mul", 1e5, step=7, elements=2)
    finding = findings(overflow, precision=FP16, events=(first,))["overflow-in-operator"]
    assert (finding.step, finding.layer) == (4, module)
    assert finding.message.startswith("In train.py:7, mul overflows FP16 in 2 elements")
    assert finding.message.endswith("It began in step 4; step 7 was computed a second time for these figures, in FP32.")


def test_a_logarithm_of_a_softmax_that_rounding_made_zero_is_to_be_a_log_softmax():
    softmax = ("_softmax", "train.py:7", "", "float16")
    made = born("log", 0, "", *softmax, line="train.py:9", step=1)
    names, told = (*softmax[:2], "backward"), {"precision": FP16, "events": (broken(1, what="loss"),)}
    in_fp32 = BrokenInFP32(step=1, names=names, text="float32", elements=4, largest=1e3)
    found = findings(made, in_fp32, **told)
    assert "torch.log_softmax" in found["input-rounded-away"].code
    assert (found["input-rounded-away"].evidence["origin_line"], "fp32-too-coarse" in found) == ("train.py:7", False)
    assert "fp32-too-coarse" in findings(in_fp32, **told)
    # Where the logarithm's line breaks, the softmax is the origin.
    from_softmax = replace(in_fp32, names=("log", "train.py:9", "backward", "", *softmax))
    assert "fp32-too-coarse" not in findings(made, from_softmax, **told)


def test_an_infinity_that_does_harm_explains_gradients_that_are_off():
    names = ("_to_copy", "train.py:9", "forward")
    off = GradientsError(step=1, names=names, text="float16", error=1.2, share=0.9, of=4, off=4)
    found = findings(born("mul", 1e5, step=1), off)
    assert (found["overflow-in-operator"].severity, "gradients-inaccurate" in found) == ("error", False)
    harmless = findings(born("mul", 1e5, step=1, is_unused=1.0), off)
    assert (harmless["overflow-in-operator"].severity, "gradients-inaccurate" in harmless) == ("info", True)


@pytest.mark.parametrize("is_bounded", [0.0, 1.0])
@pytest.mark.parametrize("module", ["head", ""])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_cast_to_fp8_that_nothing_bounds_is_inferred_where_its_module_broke(phase, module, is_bounded):
    names = ("_to_copy", "train.py:7", "backward")
    cast = CastToFP8(step=1, name=module, names=names, text="float8_e5m2", is_bounded=is_bounded)
    event = Event(4, 0, phase, "head", "weight_gradient", "head.weight", "nan", skipped=False)
    cause = findings(cast, events=(event,)).get("cast-overflows")
    assert (cause is not None) == (phase == "backward" and not is_bounded)
    if cause is not None:
        assert (cause.severity, cause.certainty, cause.step, cause.layer) == ("error", "inferred", 4, "head")
        assert "FP8 E5M2 (train.py:7), where magnitudes beyond 57344" in cause.message


@pytest.mark.parametrize("error", [0.6, 1.2])
@pytest.mark.parametrize("dtype", ["float8_e4m3", "bfloat16"])
def test_gradients_that_fp8_spoils_in_many_layers_are_the_fault_of_its_cast(dtype, error):
    origin = ("_to_copy", "train.py:5", "blocks.0", dtype)
    names = ("_softmax", "train.py:9", "forward", "", *origin)
    off = GradientsError(name="head", step=1, names=names, text=dtype, error=error, share=0.2, of=4, off=4)
    found = findings(off)["gradients-inaccurate"]
    assert found.severity == ("error" if dtype.startswith("float8") and error > 1 else "info")
    if found.severity == "error":
        assert "They begin in 'blocks.0' (train.py:5), where a cast rounds to FP8 E4M3." in found.message


@pytest.mark.parametrize(
    ("place", "is_of_cast"), [(("add_", "", "backward", ""), True), (("add_", "train.py:9", "forward"), False)]
)
def test_an_error_of_fp8_at_no_line_is_that_of_the_cast_that_cuts_values_off(place, is_of_cast):
    off = GradientsError(step=101, names=place, text="float8_e4m3", error=1.2, share=0.4, of=4, off=4)
    cut = SaturatedCast(step=31, names=("clamp", "train.py:5", "forward"), text="float8_e4m3", **CUT)
    found = findings(off, cut)
    assert ("gradients-inaccurate" in found) is not is_of_cast
    assert found["cast-saturates"].severity == ("error" if is_of_cast else "warning")


@pytest.mark.parametrize(
    ("place", "error", "severity"),
    [
        ("backward", 0.02, "info"),
        ("backward", 0.2, "warning"),
        ("backward", None, "warning"),
        ("forward", 0.02, "warning"),
    ],
)
def test_a_backwards_sum_matters_as_far_as_the_gradients_are_off(place, error, severity):
    lost = LostSum(step=1, names=("index_put", "train.py:9", place, "w"), text="float16", error=0.5, value=2, exact=1)
    assert findings(replace(lost, gradients_error=error))["sum-loses-terms"].severity == severity


@pytest.mark.parametrize(("error", "severity"), [(0.4, "info"), (1.2, "warning")])
def test_a_difference_that_is_the_noise_of_fp8_is_a_warning_where_it_is_as_large_as_the_gradients(error, severity):
    difference = amplified("add", 0.04, 0.9, text="float32", gradients_error=0.9)
    off = GradientsError(step=1, names=("", "", ""), text="float8_e4m3", error=error, of=4)
    assert findings(difference, off)["result-is-rounding-error"].severity == severity


@pytest.mark.parametrize(
    ("optimizer", "decay", "is_told"), [("Adam", 0, True), ("Adam", 0.1, False), ("AdamW", 0.1, True)]
)
def test_a_mean_of_gradients_tells_of_them_unless_it_holds_the_weights_decay(optimizer, decay, is_told):
    stepped = OptimizerRecord(optimizer, {"weight_decay": decay}, {"float32": 2}, {})
    precision = Precision({"float32": 10}, optimizers=(stepped,))
    weights = BrokenWeights(name="w", step=4, names=("w",), of=1)
    state = BrokenState(name="w", step=4, names=(optimizer, "exp_avg"), text="float32", broken=1, of=4)
    assert ("gradients-broken-after-check" in findings(weights, state, precision=precision)) == is_told


def test_a_weight_whose_growth_is_recorded_again_with_the_losss_is_named_once():
    grown = WeightGrowth(name="w", step=8, ratio=17.0, began=100.0, elements=10_000, lr=0.003, initial_lr=0.003)
    message = findings(grown, replace(grown, loss_ratio=1e6))["weights-exploded"].message
    assert message.count("'w'") == 1
    assert "The loss had grown to 1e+06 times" in message


@pytest.mark.parametrize(("fraction", "severity"), [(0.05, "info"), (0.2, "warning")])
def test_few_ties_are_information(fraction, severity):
    ties = Ties(step=1, name="moe", text="bfloat16", fraction=fraction, k=2, scores=64)
    assert findings(ties)["router-ties"].severity == severity


def test_an_overflow_counts_its_elements():
    message = findings(born("sum", 1e5, step=1, elements=1))["overflow-in-operator"].message
    assert message.startswith("In step 1, in train.py:7, sum overflows FP16 in 1 element: the exact result is finite")


def test_an_overflow_whose_operator_is_known_explains_the_constant_that_it_made():
    event = broken(4, what="loss")
    constant = ExaminedArgument(step=4, text="a product with a constant that is infinite or NaN", elements=8, bits=32)
    found = findings(constant, born("exp", 1e8, line="train.py:10"), precision=FP16, events=(event,))
    assert found["overflow-in-operator"].evidence["line"] == "train.py:10"
    assert "argument-out-of-range" not in found
    assert "argument-out-of-range" in findings(constant, precision=FP16, events=(event,))


def test_a_batch_that_a_cast_made_infinite_is_the_casts_fault():
    batch = ExaminedBatch(step=4, elements=3, rows=3, of_rows=8)
    cast = born("_to_copy", 1e5)
    events = tuple(broken(step, given=True) for step in (4, 5))
    found = findings(batch, cast, precision=FP16, events=events)
    assert found["overflow-in-operator"].severity == "error"
    assert "FP32" in found["overflow-in-operator"].fix
    assert "batch-not-finite" not in found
    in_a_module = replace(cast, name="head")
    assert "batch-not-finite" in findings(batch, in_a_module, precision=FP16, events=events)


def test_the_exponential_before_a_cast_is_to_be_bounded():
    finding = findings(born("_to_copy", 1e6, "train.py:9", line="train.py:10", exponent=14.3))["overflow-in-operator"]
    assert "exp (train.py:9) gets arguments up to 14.3" in finding.message
    assert "exp()" in finding.code
    without = findings(born("_to_copy", 1e6, line="train.py:10"))["overflow-in-operator"]
    assert "layer(x)" in without.code
    assert "exp" not in without.message.replace("the exact", "")


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("mul", "y = a.float() * b.float()"),
        ("add_", "y = a.float() + b.float()"),
        ("rsub", "y = a.float() - b.float()"),
        ("div", "y = a.float() / b.float()"),
        ("mm", "y = a.float() @ b.float()"),
        ("addmm", "y = x.float() @ w.float().T + b.float()"),
        ("pow", "y = x.float().pow(p)"),
        ("exp", "y = x.float().exp()"),
        ("_softmax", "y = x.float().softmax(dim)"),
        ("mean", "y = x.float().mean()"),
        ("linalg_vector_norm", "y = x.float().norm()"),
        ("convolution", "y = f(x.float())"),
    ],
)
def test_the_code_of_an_overflow_is_the_operator_in_fp32(operator, line):
    overflow = born(operator, 1e6, step=7)
    code = findings(overflow, precision=FP16, events=(broken(7),))["overflow-in-operator"].code
    assert code.splitlines()[1:] == [f"    {line}", "    # the operators that take y", "    z = g(y)"]
    half = {name: torch.full((4, 4), 8.0).half() for name in "abwx"}
    names = {**half, "torch": torch, "device_type": "cpu", "p": 2, "dim": 0, "f": torch.relu, "g": torch.relu}
    with torch.autocast("cpu", torch.bfloat16):
        exec(code, names)
    assert names["y"].dtype is torch.float32


def code_at(source, operator="mul", largest=1e6, record=None):
    """The code of an overflow, or of another record, in a line of the script, below that line."""
    record = record or born(operator, largest, name="head", step=7)
    stored = replace(record.measurement(), sources={"train.py:7": source})
    session = session_with(stored, precision=FP16, events=(broken(7),))
    code = next(each.code for each in analyse(session).findings if each.evidence.get("operator") == operator)
    first, *more = code.splitlines()
    assert first == f"# train.py:7: {source}"
    return "\n".join(more)


WITH = "with torch.autocast(device_type, enabled=False):"
TAKEN = "# the operators that take y"


@pytest.mark.parametrize(
    ("operator", "source", "before", "inside"),
    [
        (
            *("mul", "return self.down(self.gate(x) * self.up(x))", "a = self.gate(x)\nb = self.up(x)\n"),
            ["y = a.float() * b.float()", TAKEN, "return self.down(y)"],
        ),
        (
            *("pow", "loss = (model(x) - price).square().mean()", "value = model(x) - price\n"),
            ["y = value.float().square()", TAKEN, "loss = y.mean()"],
        ),
        ("pow", "power = x**3 + 1", "", ["y = x.float().pow(3)", TAKEN, "power = y + 1"]),
        (
            *("pow", "rates = 10000.0 ** (-steps / width)", "x = -steps / width\n"),
            ["rates = 10000.0 ** x.float()", f"{TAKEN[:-1]}rates"],
        ),
        ("sum", "return x.sum(1) / n", "", ["y = x.float().sum(1)", TAKEN, "return y / n"]),
        ("mean", "m = torch.mean(x, -1)", "", ["m = x.float().mean(-1)", f"{TAKEN[:-1]}m"]),
        ("div", "h = 1 / b", "", ["h = 1 / b.float()", f"{TAKEN[:-1]}h"]),
        ("bmm", "s = torch.matmul(q, k.mT)", "", ["s = q.float() @ k.mT.float()", f"{TAKEN[:-1]}s"]),
        (
            *("mul", "loss = (y * b).mean()", ""),
            ["result = y.float() * b.float()", f"{TAKEN[:-1]}result", "loss = (result).mean()"],
        ),
        ("mul", "y = y * b", "", ["y = y.float() * b.float()", TAKEN]),
        ("mul_", "ä = b * a", "", ["ä = b.float() * a.float()", f"{TAKEN[:-1]}ä"]),
    ],
)
def test_the_code_has_the_operands_of_the_users_line(operator, source, before, inside):
    assert code_at(source, operator) == "\n    ".join([before + WITH, *inside])


@pytest.mark.parametrize(
    "source",
    [
        "for x in self.scales(y * z):",
        "return self.block(x)",
        "y = p * q * r",
        "y = self.weight.half() * x",
        "y = a * b.to(x.dtype)",
        "y = mul(*pair)",
        "y *= 2",
        "mask = '",
    ],
)
def test_the_code_keeps_its_own_names_where_the_line_does_not_have_the_operator_once(source):
    assert code_at(source).splitlines()[1:] == ["    y = a.float() * b.float()", f"    {TAKEN}", "    z = g(y)"]


def test_a_residual_stream_keeps_its_branch_at_the_addition():
    line = "return x + 0.3 * self.mlp(self.norm(x)).to(x.dtype)"
    assert code_at(line, "add", record=absorbed(size=1.0)).splitlines() == [
        "# once, before the blocks",
        "x = x.float()",
        "# in each block",
        "b = 0.3 * self.mlp(self.norm(x)).to(x.dtype)",
        "y = x.float() + b.float()",
        "return y",
    ]


def test_a_logarithm_of_a_softmax_stays_a_call_of_log_softmax():
    of_softmax = ExaminedArgument(step=7, text="a logarithm of zero, the result of a softmax", elements=1, calls=1)
    called = CalledLines(step=7, text="log", names=("train.py:7",))
    sources = {"train.py:7": "loss = -(t * p.log()).sum()"}
    stored = [replace(record.measurement(), sources=sources) for record in (of_softmax, called)]
    report = analyse(session_with(*stored, events=(broken(7),)))
    code = next(each.code for each in report.findings if each.id == "argument-out-of-range")
    assert code.splitlines()[1:] == [
        "# in place of log(p)",
        "y = torch.log_softmax(logits, -1)",
        "loss = -(t * y).sum()",
    ]


def test_operands_that_were_rounded_are_computed_anew_in_fp32():
    code = code_at("return (a * b).sum(-1) / (a.norm() * b.norm() + 1e-8)", "div", largest=0.0)
    assert code.splitlines() == [
        WITH,
        "    # from inputs in FP32",
        "    left = (a * b).sum(-1)",
        "    right = a.norm() * b.norm() + 1e-8",
        "    y = left.float() / right.float()",
    ]
    cancelled = amplified("sub", 0.01, 9.0, line="train.py:7", name="norm", gradients_error=0.5)
    code = code_at("v = (x * x).mean() - mean * mean", "sub", record=cancelled)
    assert code.splitlines()[1:] == [
        "    # from inputs in FP32",
        "    a = (x * x).mean()",
        "    b = mean * mean",
        "    v = a - b",
    ]


def test_a_scattered_sum_has_the_indices_and_the_terms_of_the_users_line():
    names = ("index_put", "train.py:7", "forward")
    lost = LostSum(name="hub", step=1, names=names, text="bfloat16", error=0.7, value=256.0, exact=1120.0)
    source = "return total.index_put((target,), messages, accumulate=True) / degree"
    assert code_at(source, "index_put", record=lost) == (
        "total = total.float().index_put(\n    (target,), messages.float(), accumulate=True\n)"
    )
    lost = replace(lost, names=("index_add", "train.py:7", "forward"))
    source = "degree = x.new_zeros(n).index_add(0, target, x.new_ones(m))"
    assert code_at(source, "index_add", record=lost) == (
        "degree = x.new_zeros(n).float().index_add(\n    0, target, x.new_ones(m).float()\n)"
    )
    # In the code of scatter_add the line's operands have no place.
    lost = replace(lost, names=("scatter_add", "train.py:7", "forward"))
    code = code_at("degree = degree.scatter_add(0, target, ones)", "scatter_add", record=lost)
    assert code == "total = total.float().index_add(\n    0, index, terms.float()\n)"


@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_a_linear_layer_that_overflows_computes_in_fp32(weights):
    precision = replace(FP16, weights={weights: 10})
    code = findings(born("addmm", 1e6, name="1", step=7), precision=precision, events=(broken(7),))
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4)).to(getattr(torch, weights))
    exec(code["overflow-in-operator"].code, {"torch": torch, "device_type": "cpu", "model": model})
    with torch.autocast("cpu", torch.float16):
        out = model(torch.full((1, 4), 6e4).half() * 1.0)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert model[1].weight.grad.isfinite().all()


def test_the_operands_of_a_difference_are_computed_in_fp32():

    def code_of(operator, *origin):
        return findings(amplified(operator, 0.01, 9.0, "w", *origin, gradients_error=0.5))[
            "result-is-rounding-error"
        ].code

    names = {"torch": torch, "device_type": "cpu", "f": torch.square, "g": torch.square, "x": torch.ones(4).bfloat16()}
    exec(code_of("sub"), names)
    assert names["a"].dtype is names["difference"].dtype is torch.float32
    assert code_of("sin").splitlines()[1:] == ["    x = f(z.float())", "    y = x.sin()"]
    code = code_of("sin", "div", "train.py:5", "head", "bfloat16")
    assert code.splitlines()[1:] == ["    x = a.float() / b.float()", "    y = x.sin()"]


def test_rounded_ids_have_an_example():
    changed = ChangedIntegers(step=1, names=PLACE, text="bfloat16", changed=114, of=128, given=8576, exact=8544)
    finding = findings(changed)["integers-rounded"]
    assert finding.severity == "warning"
    assert finding.message.endswith("before they become integers, which changed 114 of the 128: 8544 became 8576.")


@pytest.mark.parametrize(("settings", "is_far"), [({"beta2": 0.999}, True), ({"momentum": 0.9}, False)])
def test_updates_far_beyond_adams_are_of_its_squares_and_not_of_the_learning_rate(settings, is_far):
    # The root mean square of 10,000 elements grows from 1 to 17 in 9 steps: 1.8 a step, at a learning rate of 0.003.
    grown = WeightGrowth(name="w", step=8, ratio=17.0, began=100.0, elements=10_000, lr=0.003, initial_lr=0.003)
    precision = Precision({"float32": 10}, optimizers=(OptimizerRecord("Adam8bit", settings),))
    event = replace(broken(47), skipped=False)
    progress = Progress(60, 60, 0, 60, True)
    finding = findings(grown, precision=precision, events=(event,), progress=progress)["weights-exploded"]
    assert ("moved by 593 times the learning rate" in finding.message) is is_far
    assert finding.fix.startswith(("Lower the learning rate", "Keep the optimizer's average of squared")[is_far])


def test_a_limit_of_scaled_gradients_at_one_line_is_reported_once():
    limits = [replace(mixed("limit"), step=step, names=("clamp", "train.py:7"), share=0.5) for step in (1, 101)]
    session = session_with(*(each.measurement() for each in limits))
    (found,) = [each for each in analyse(session).findings if "clamp sets 50%" in each.message]
    assert found.evidence["measured_steps"] == 2


def mixed(text, *names, **others):
    fields = {"name": "0.weight", "loss_scale": 1024.0, "first": 1.0, "second": 0.0, **others}
    return MixedPowers(step=1, names=("add_", "train.py:7", *names), text=text, **fields)


@pytest.mark.parametrize(
    ("record", "words", "code"),
    [
        (mixed("accumulated", "0.weight", "0.bias"), "in '0.weight', '0.bias': the loss of one", "other_loss"),
        (mixed("gradient"), "(train.py:7) a value that is not multiplied", "scaler.unscale_(optimizer)"),
        (mixed("optimizer"), "is still multiplied by the loss scale", "scaler.step(optimizer)"),
        (mixed("optimizer", first=0.0, second=-1.0), "too small by the loss scale", "other_loss"),
        (mixed("number"), "a number is added to a value", "create_graph=True"),
        (mixed("values"), "are added to values", "loss + other_loss"),
    ],
)
def test_each_mixture_of_scales_has_its_fix(record, words, code):
    finding = findings(record)["scaled-plus-unscaled"]
    assert (finding.severity, finding.step) == ("error", 1)
    assert words in finding.message
    assert code in finding.code


def in_backward(step, scale, *maxima):
    return Event(step, 0, "backward", "0", "activation", "0", "inf", scale, maxima, True, True)


@pytest.mark.parametrize(
    ("operator", "from_finite", "is_told"), [("div", True, True), ("div", False, False), ("exp", True, False)]
)
def test_a_number_that_a_cast_makes_one_is_told_if_a_step_computed_twice_divides_by_zero(
    operator, from_finite, is_told
):
    names = ("_to_copy", "train.py:5", BEFORE_STEPS)
    prepared = PreparedError(names=names, text="bfloat16", elements=1000, value=1.0, exact=0.998, ones=10.0)
    names = (operator, "train.py:9", "forward")
    broken = BrokenAlike(step=17, names=names, text="bfloat16", elements=1, of=16, from_finite=from_finite)
    found = findings(prepared, broken)
    assert ("prepared-in-16-bits" in found) == is_told
    if is_told:
        assert "div (train.py:9), in step 17" in found["prepared-in-16-bits"].message


def test_a_mixture_explains_the_skipped_steps_that_it_makes():
    events = tuple(in_backward(step, 2.0 ** (20 - step)) for step in range(8))
    found = findings(mixed("number"), precision=FP16, events=events)
    assert found["non-finite-event"].severity == "info"
    assert all(found[id].severity == "info" for id in ("initial-scale-too-high", "scale-too-high") if id in found)


def test_a_mixture_of_gradients_is_not_reported_in_addition_to_a_measurement_of_all_of_them():
    figures = {"zeroed": 0, "sum_of_squares": 1, "not_finite": 0, "nans": 0, "masters": False}
    measured = ChangedBeforeStep(step=1, factor=0.5, is_uniform=True, **figures)
    assert "scaled-plus-unscaled" not in findings(mixed("optimizer"), measured)


@pytest.mark.parametrize("state", ["exp_avg_sq", "v"])
@pytest.mark.parametrize(("weights", "fix"), [("float32", "in FP32 already"), ("bfloat16", "Keep the weights")])
def test_moments_in_16_bits_of_fp32_weights_are_the_optimizers_choice(weights, fix, state):
    optimizer = OptimizerRecord("Adam16", {"beta2": 0.999}, {weights: 10}, {state: "bfloat16"})
    finding = findings(precision=Precision({weights: 10}, optimizers=(optimizer,)))["moments-cannot-decay"]
    assert fix in finding.fix


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moments_that_never_halve_are_those_that_rounding_stops(dtype):
    """The settings agree with products of every number between two powers of two, until none changes."""
    kind = getattr(torch, dtype)
    numbers = torch.tensor(1.0, dtype=kind).view(torch.int16) + torch.arange(1 << (7 if dtype == "bfloat16" else 10))
    numbers = numbers.to(torch.int16).view(kind).float()[1:]
    for kept in (0.9, 0.99, 0.995, 0.9960, 0.9962, 0.997, 0.998, 0.999, 0.9994, 0.9995, 0.9996, 0.9998, 0.9999):
        now, last = numbers, numbers + 1
        while bool((now != last).any()) and bool((now > 1).all()):
            now, last = (now * kept).to(kind).float(), now
        optimizer = OptimizerRecord("Adam16", {"beta2": kept}, {"float32": 10}, {"exp_avg_sq": dtype})
        found = findings(precision=Precision({"float32": 10}, optimizers=(optimizer,)))
        assert ("moments-cannot-decay" in found) is bool((now > 1).all()), kept


@pytest.mark.parametrize(("phase", "is_told"), [("forward", True), ("backward", False)])
def test_an_epsilon_of_ones_own_optimizer_is_inferred_from_the_broken_update(phase, is_told):
    event = Event(1, 0, phase, "0", "activation", "0", "nan", 1.0, (), False, False)
    optimizer = OptimizerRecord("SimpleAdam", {"eps": 1e-8}, {"float16": 10}, {"m": "float16", "v": "float16"})
    found = findings(precision=Precision({"float16": 10}, optimizers=(optimizer,)), events=(event,))
    assert ("epsilon-zero" in found) is is_told
    if is_told:
        assert (found["epsilon-zero"].certainty, found["epsilon-zero"].severity) == ("inferred", "error")


@pytest.mark.parametrize(("largest", "is_told"), [(200.0, True), (30_000.0, False)])
def test_overflows_of_gradients_that_grow_are_not_outliers(largest, is_told):
    events = tuple(in_backward(step, scale, largest) for step, scale in ((5, 64.0), (8, 32.0), (10, 16.0), (15, 8.0)))
    assert ("overflow-recurs" in findings(precision=FP16, events=events)) is is_told


def test_gradients_divided_after_each_backward_are_named_beside_the_measured_factor():
    divided = mixed("divided", "head", name="head", loss_scale=2048.0, first=0.0, second=1.0)
    measured = ChangedBeforeStep(name="head", step=0, factor=7e-5, is_uniform=True, of=10.0, zeroed=0.0)
    finding = findings(divided, measured, precision=FP16)["scaled-plus-unscaled"]
    assert finding.severity == "error"
    assert "2^11 times too small" in finding.message
    assert finding.fix == "Divide the gradients once, after the last backward of the step."
    added = replace(divided, text="accumulated")
    assert "scaled-plus-unscaled" not in findings(added, measured, precision=FP16)


@pytest.mark.parametrize(
    ("operator", "buffer", "says", "code"),
    [
        ("mul_", "sampler.tau", "multiplications in BF16 leave 100% of the buffer", 'get_buffer("sampler.tau")'),
        ("mul", "", "such as a schedule or a decaying average", "value.float()"),
        ("add_", "calls", "additions in BF16 leave 100% of the buffer", 'get_buffer("calls")'),
        ("lerp_", "", "such as a moving average", "weight.detach().float()"),
    ],
)
def test_a_tensor_that_stays_is_named_with_the_operator_that_leaves_it(operator, buffer, says, code):
    record = FrozenBuffer(step=1, names=(operator, "train.py:7", "forward", buffer), text="bfloat16", unchanged=1.0)
    finding = findings(record)["buffer-stops-changing"]
    assert finding.severity == "warning"
    assert says in finding.message
    assert not buffer or f"{says} '{buffer}'" in finding.message
    assert code in finding.code


def choices(operator="_to_copy", **figures):
    figures = {"changed": 300, "of": 3264, "given": 17, "exact": 18, **figures}
    return ChangedChoices(step=1, names=(operator, "train.py:7", "forward"), text="bfloat16", **figures)


def test_choices_are_named_with_the_effect_of_rounding_on_their_numbers():
    floors = findings(choices(whole=0.15))["choices-differ"]
    assert (floors.severity, floors.certainty) == ("warning", "measured")
    assert "300 of 3264, such as 17 in place of 18" in floors.message
    assert "15% of these numbers have a fraction in FP32 and none in BF16" in floors.message
    table = findings(choices("searchsorted", entries=4000, distinct=760))["choices-differ"]
    assert "760 distinct values in 4000 entries" in table.message
    assert "300 of 3264 results differ" in table.message
    assert "cumsum" in table.code
    before = findings(choices("bucketize", entries=4000, distinct=760, changed=0, of=0))["choices-differ"]
    assert before.certainty == "inferred"
    assert "results differ" not in before.message
    nearest = findings(choices("argmin"))["choices-differ"]
    assert "argmin of numbers in BF16 makes other integers" in nearest.message
    assert "scores = a.float() @ b.float().T" in nearest.code


def test_a_zero_that_the_precision_made_is_named_with_its_difference_and_is_computed_in_fp32():
    names = ("sqrt", "train.py:7", "forward", "train.py:5")
    rounded = RoundedArgument(step=1, names=names, text="bfloat16", elements=6, of=72, given=0.0, exact=0.0123)
    examined = ExaminedArgument(name="head", step=4, text="a square root of zero, where ...", elements=1, bits=16)
    finding = findings(rounded, examined, events=(broken(4),))["argument-out-of-range"]
    assert "In step 1, which was computed twice, 6 of its 72 arguments were mostly rounding error, " in finding.message
    assert "after the sum or difference in train.py:5: one was 0 in 16 bits and 0.0123 in FP32" in finding.message
    assert "train.py:7" in finding.message
    assert finding.fix.startswith("Compute the terms of this difference in FP32")
    assert "Clamp it as well" in finding.fix
    without = findings(examined, events=(broken(4),))["argument-out-of-range"]
    assert without.fix.startswith("Add a small constant")
    of_difference = replace(examined, text="a square root of zero, a difference of terms rounded to 16 bits, where ...")
    assert findings(of_difference, events=(broken(4),))["argument-out-of-range"].fix == finding.fix


def in_head(operator, largest, *origin, **figures):
    return born(operator, largest, *origin, name="head", step=7, **{"elements": 2, **figures})


def test_a_sum_that_overflows_is_named_with_the_operator_that_used_the_range_up():
    overflow = in_head("sum", 4e5, "", "exp", "train.py:5", "head.log", "float16", near=3e4)
    finding = findings(overflow, precision=FP16, events=(broken(7),))["overflow-in-operator"]
    assert finding.message.startswith(
        "In step 7, in 'head.log' (train.py:5), exp makes numbers up to 3e+04, near FP16's end of 65504; in 'head' (train.py:7), "
        "sum overflows in 2 elements: the exact result is finite, up to 4e+05."
    )
    assert finding.fix.startswith("Compute in FP32 from 'head.log' (train.py:5) to 'head' (train.py:7)")
    assert "subtract the largest exponent first" in finding.fix


def test_an_infinity_of_rounded_inputs_is_named_with_the_operator_that_rounded_them():
    log = in_head("log", 0, "", "_to_copy", "train.py:5", "head", "float16")
    finding = findings(log, precision=FP16, events=(broken(7),))["input-rounded-away"]
    assert "In step 7, in 'head' (train.py:5), a cast rounds to FP16 and loses the value" in finding.message
    assert "Compute in FP32 from 'head' (train.py:5) to 'head' (train.py:7)" in finding.fix
    # An operator of the same line has no other place.
    same_line = replace(log, names=(*log.names[:5], "train.py:7", *log.names[6:]))
    alone = findings(same_line, precision=FP16, events=(broken(7),))
    assert "an earlier operator had rounded away" in alone["input-rounded-away"].message


def test_a_difference_is_named_with_the_addition_that_rounded_its_operands():
    origin = ("w", "add", "train.py:5", "value", "bfloat16")
    left = amplified("sub", 0.007, 7.7, *origin, text="float32", gradients_error=0.9)
    finding = findings(left)["result-is-rounding-error"]
    assert finding.message.startswith(
        "In step 1, in 'value' (train.py:5), add rounds to BF16, and in train.py:9, a difference leaves mostly that error"
    )
    assert "the gradient of 'w' is off by 90%" in finding.message
    assert finding.fix.startswith("Compute in FP32 from 'value' (train.py:5) to train.py:9")


def test_an_overflow_that_makes_a_zero_leads_before_the_logarithm_of_it():
    examined = ExaminedArgument(step=4, text="a logarithm of zero", elements=4, bits=16)
    names = ("log10", "train.py:9", "forward", "")
    rounded = RoundedArgument(step=7, names=names, text="float16", elements=4, of=4, given=0.0, exact=2e-4)
    overflow, events = in_head("sum", 8e4), (broken(4), broken(7))
    found = findings(examined, rounded, overflow, precision=FP16, events=events)
    assert (found["overflow-in-operator"].severity, found["argument-out-of-range"].severity) == ("error", "info")
    # A logarithm of an exact zero is the script's own.
    assert "overflow-in-operator" not in findings(examined, overflow, precision=FP16, events=events)


READ = ReadNumber(
    step=18, names=("item", "t.py:9", "forward", "t.py:8"), text="bfloat16", value=0.5, exact=0.51, terms=40
)


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        ({"exact": 0.505}, True),
        ({"exact": 0.51005}, False),
        ({"value": 0.498, "exact": 0.505}, False),
        ({"names": ("item", "t.py:7", "forward", "t.py:8"), "exact": 0.505}, False),
        ({"terms": 2, "exact": 0.505}, False),
        ({"exact": None}, False),
    ],
    ids=["the same", "hardly changed", "another", "at another line", "of few terms", "of an earlier session"],
)
def test_a_number_that_is_the_same_in_two_steps_as_its_sum_has_16_bits_is_named(change, is_found):
    found = findings(READ, replace(READ, step=24, **change)).get("metric-stands-still")
    assert (found is not None) is is_found
    if is_found:
        assert (found.severity, found.step) == ("warning", 18)
        assert (
            "0.5 (t.py:9). In FP32 it is 0.51 and 0.505: it is made of a sum of 40 terms in BF16 (t.py:8)"
            in found.message
        )


CUT = {"lost": 0.1, "saturated": 0.1, "largest": 1e3, "bound": 448.0}
LOG = ("log", "train.py:7", "forward", "clamp", "train.py:5")
ZERO = ExaminedArgument(step=7, text="a logarithm of zero", elements=5, bits=16)
BATCH = ExaminedBatch(step=7, elements=5)


@pytest.mark.parametrize(
    ("records", "event", "severity"),
    [
        ([], None, "info"),
        ([], broken(7), "error"),
        ([ZERO], broken(7), "error"),
        ([replace(ZERO, text="a square root of zero")], broken(7), "info"),
        ([BATCH], broken(7), "info"),
        ([ExaminedTarget(step=7, elements=5)], broken(7), "error"),
        ([in_head("mul", 1e5, line="train.py:9")], broken(7), "info"),
        ([in_head("log", 0.0)], broken(7), "error"),
        ([], replace(broken(7), module="body"), "info"),
        ([], replace(broken(7), phase="backward", forward_finite=True, after=True), "error"),
        ([], replace(broken(7), phase="backward", forward_finite=True), "info"),
    ],
)
def test_a_bound_that_rounds_away_is_an_error_where_it_explains_the_break(records, event, severity):
    bound = RoundedBound(step=1, names=LOG, text="bfloat16", bound=0.9999, rounded=1, nearest=0.996, given=0)
    bound = replace(bound, name=broken(7).module)
    found = findings(bound, *records, precision=FP16, events=(event,) if event else ())["bound-rounds-away"]
    assert (found.severity, found.certainty) == (severity, "inferred")
    assert found.step == (7 if severity == "error" else 1)


@pytest.mark.parametrize("is_negative", [False, True])
def test_negative_infinities_that_break_nothing_are_an_info(is_negative):
    overflow = in_head("add", 1.3e5, is_negative=float(is_negative))
    alone, broke = findings(overflow, precision=FP16), findings(overflow, precision=FP16, events=(broken(7),))
    assert alone["overflow-in-operator"].severity == ("info" if is_negative else "warning")
    assert broke["overflow-in-operator"].severity == "error"


@pytest.mark.parametrize(("largest", "is_mask"), [(0.0, False), (3.4e38, True), (None, True)])
def test_a_mask_is_not_blamed_for_infinities_that_rounding_makes_in_its_module(largest, is_mask):
    mask = ExaminedMask(name="head", step=7, text="a softmax of a row of only -inf", elements=9)
    made = [] if largest is None else [in_head("log", largest)]
    assert ("mask-hides-whole-row" in findings(mask, *made, events=(broken(7),))) is is_mask


def test_a_mask_whose_finite_numbers_become_infinite_names_their_line():
    mask = ExaminedMask(name="head", step=7, text="a softmax of a row of only -inf", elements=9)
    made = in_head("mul", 1e9, line="train.py:5", is_negative=1.0)
    found = findings(mask, made, precision=FP16, events=(broken(7),))["mask-hides-whole-row"]
    assert "up to 1e+09 in magnitude, which FP16 makes -inf (train.py:5)" in found.message
    assert "torch.finfo(scores.dtype).min" in found.code


def test_a_forwards_loss_comes_before_a_backwards_that_computes_with_it():
    names = ("index_put", "train.py:9", "backward", "w")
    lost = LostSum(step=1, names=names, text="bfloat16", error=0.4, value=-16, exact=-30, gradients_error=500)
    assert list(findings(lost, absorbed(size=1.0))) == ["addition-changes-nothing", "sum-loses-terms"]
    forward = replace(lost, names=("sum", "train.py:9", "forward", "w"))
    assert list(findings(forward, absorbed(size=1.0))) == ["sum-loses-terms", "addition-changes-nothing"]


def trained(loss_of, scale):
    """Train in FP16 and compute steps twice; return the findings by id."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)

    def loss(step):
        with torch.autocast("cpu", torch.float16):
            return loss_of(model(torch.randn(16, 8)))

    inspector = inspected(model, loss, 4, lr=1e-3, scaler=cpu_scaler(scale), second=True)
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def distance(y):
    # From torch 2.15 on, clamp_min passes no gradient at its bound.
    return (y[:, None] - y).square().sum(-1).add(1e-10).sqrt().float().mean()


def confidence(y):
    share = (40 * y).sigmoid().clamp(1e-3, 0.9999)
    return -(1 - share).log().float().mean()


def entropy(y):
    share = y.relu()
    return -(share * (share + 1e-9).log()).float().mean()


@pytest.mark.parametrize(
    ("loss_of", "scale", "says"),
    [
        (distance, 2.0**-10, ("the gradient of sqrt", "add", "1e-10, which FP16 rounds to 0", "5.96046e-08")),
        (confidence, 1.0, ("log is infinite", "clamp", "0.9999, which FP16 rounds to 1", "0.999512")),
        (entropy, 1.0, ("log is infinite", "add", "1e-09, which FP16 rounds to 0", "5.96046e-08")),
    ],
)
def test_a_bound_that_16_bits_do_not_hold_is_the_cause_of_the_infinity(loss_of, scale, says):
    found = trained(loss_of, scale)["input-rounded-away"]
    assert [each for each in says if each not in found.message] == []
    first = loss_of.__code__.co_firstlineno
    lines = [f"test_second_findings.py:{first + 1 + offset}" for offset in range(2)]
    assert any(line in found.message for line in lines)
    assert found.fix.startswith(f"Compute in FP32 from {says[1]} (test_second_findings.py:")


def test_a_bound_that_is_not_reached_is_not_a_cause():
    # The argument is a difference of equal terms.
    found = trained(lambda y: (y.clamp_min(1e-9) * 0 + (y.sigmoid() + 1 - 1).square()).log().float().mean(), 1.0)
    assert not any("rounds to 0" in finding.message for finding in found.values())


@pytest.mark.parametrize(("dtype", "is_nan"), [("float16", False), ("float32", True)])
def test_a_kept_number_that_is_only_computed_is_named_where_the_batch_broke(dtype, is_nan):
    stuck = StuckNumber(step=9, names=PLACE, text=dtype, is_nan=is_nan, is_compared=False)
    assert "kept-number-not-finite" not in findings(stuck)
    found = findings(stuck, BATCH)
    finding = found["kept-number-not-finite"]
    assert (finding.severity, finding.certainty, finding.step) == ("error", "inferred", 7)
    assert "from step 7 on" in finding.message
    assert ("float32" in finding.code) is (dtype == "float16")
    assert found["batch-not-finite"].severity == "info"
    assert findings(replace(stuck, is_compared=True))["kept-number-not-finite"].severity == "warning"
