"""The sentences of diagnoses follow from their measurements."""

import math
from dataclasses import replace
from textwrap import indent

import pytest
import torch
from analysis_sessions import activation, session_of, spread, weight, window_of
from torch import nn
from trainings import cpu_scaler, inspected

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.capture.graph import graph
from mpinspect.ranges.faults.measure.singularities import Rows, overflowed, overflowed_pack, singular
from mpinspect.ranges.session import Event, Measurement, OptimizerRecord, Precision, Progress, ScaleChange, ScalerRecord
from mpinspect.ranges.windows.tensors import LostUpdates, TensorKey, TensorWindow

FINE = spread({-3: 1000})
STEPS = 20


def found(id, *measurements, layers=None, progress=None, **others):
    """Return the finding of a run of 20 steps with these measurements."""
    progress = progress or Progress(STEPS, STEPS, 0, STEPS, True)
    session = session_of(layers or {weight("w"): FINE}, progress=progress, measurements=measurements, **others)
    return next(finding for finding in analyse(session).findings if finding.id == id)


def ids(session):
    return {finding.id for finding in analyse(session).findings}


def clipped(sum_of_squares, not_finite=0, **figures):
    """Return the record of gradients that a clip set to zero in step 3."""
    figures = {"zeroed": 4.0, "of": 4.0, "factor": 0.0, "sum_of_squares": sum_of_squares, **figures}
    return Measurement("changed-before-step", "w", 3, {**figures, "not_finite": float(not_finite)}, ("w",))


def examined(text, step=8, names=(), elements=1.0, **figures):
    return Measurement("examined-argument", "", step, {"elements": elements, **figures}, names, text)


def overflow(step, scale, module="fc", **others):
    return Event(step, 0, "backward", module, "activation", module, "inf", float(scale), (), True, True, **others)


def event(step, phase="backward", **others):
    fields = {"loss_scale": 1.0, "skipped": False, "forward_finite": phase == "backward", "gradients_finite": False}
    fields |= others
    return Event(step, 0, phase, "fc", fields.pop("what", "activation"), "fc", "nan", **fields)


def broken_alike(step):
    figures = {"elements": 1.0, "of": 4.0, "from_finite": 1.0}
    return Measurement("second-broken-alike", "fc", step, figures, ("sqrt", "train.py:3", "backward", ""))


@pytest.mark.parametrize(
    ("squares", "not_finite", "words"),
    [
        (1e10, 0, "the norm of the model's FP16 gradients, 1e+05, is beyond 65504, where FP16 ends"),
        (1e6, 0, "the sum of squares of the model's FP16 gradients, 1e+06, is beyond 65504, where FP16 ends"),
        (1e10, 1, "(the norm of the others, 1e+05, is beyond 65504 too: summed up in FP16 it is infinite as well)"),
        (
            1e6,
            1,
            "(the sum of squares of the others, 1e+06, is beyond 65504 too: summed up in FP16 it is infinite as well)",
        ),
        (
            1e3,
            1,
            "1 of the model's gradients held infinities or NaNs, so that the norm was not finite, and dividing by the norm",
        ),
    ],
)
def test_the_sentence_on_a_norm_names_the_overflowing_quantity(squares, not_finite, words):
    finding = found("gradients-clipped-to-zero", clipped(squares, not_finite))
    assert finding.message.startswith("In step 3 the gradients that the optimizer was given were zeros or NaNs: ")
    assert words in finding.message
    finding = found("gradients-clipped-to-zero", clipped(squares, not_finite, nans=0.0))
    assert finding.message.startswith("In step 3 the gradients that the optimizer was given were zeros: ")
    assert ("model.float()" in finding.code) is bool(not_finite)
    assert ("GradScaler that begins below 1" in finding.fix) is bool(not_finite)


@pytest.mark.parametrize(
    ("ledger", "measurements", "is_norm"),
    [
        ({"weights": {"float32": 9}, "outputs": ("float32",)}, (), False),
        ({"weights": {"float32": 9}, "autocast": ("bfloat16",), "outputs": ("bfloat16",)}, (), False),
        ({"weights": {"float32": 9}, "outputs": ("float32", "float16")}, (), True),
        ({"weights": {"float16": 9}, "outputs": ("float16",)}, (), True),
        ({"weights": {"float16": 9}}, [broken_alike(step=3)], False),
        ({"weights": {"float16": 9}}, [broken_alike(step=5)], True),
    ],
    ids=["FP32", "BF16", "FP16 in part", "FP16", "FP16, broken in FP32 too", "FP16, broken later"],
)
def test_no_norm_is_to_blame_for_gradients_that_a_wider_format_would_not_make_finite(ledger, measurements, is_norm):
    others = {"precision": Precision(**ledger), "progress": Progress(STEPS, STEPS, 0, STEPS, True)}
    measurements = (clipped(1e3, not_finite=1), *measurements)
    session = session_of({weight("w"): FINE}, measurements=measurements, events=(event(3),), **others)
    graver = {finding.id for finding in analyse(session).findings if finding.severity != "info"}
    assert ("gradients-clipped-to-zero" in graver) is is_norm
    # Each way the infinities and NaNs have a cause.
    assert graver & {"non-finite-event", "breaks-in-fp32-too", "gradients-clipped-to-zero"}


FIRST = "its output was the first that was not finite; its input was finite"


@pytest.mark.parametrize(
    ("module_type", "dtype", "explanation", "is_by_weights"),
    [
        ("Linear", "bfloat16", FIRST, True),
        ("Embedding", "float32", f"{FIRST}; the step before was not watched", True),
        ("LayerNorm", "float32", FIRST, False),
        ("Linear", "float16", FIRST, False),
        ("Linear", "float32", f"{FIRST} except -inf, as in a mask", False),
        ("Linear", "float32", "its output was the first that was not finite", False),
    ],
)
def test_a_nan_of_products_with_a_finite_input_is_the_weights(module_type, dtype, explanation, is_by_weights):
    broken = event(3, "forward", module_type=module_type, dtype=dtype, explanation=explanation)
    session = session_of({weight("w"): FINE}, events=(broken,), progress=Progress(STEPS, STEPS, 0, STEPS, True))
    for devices in ("cuda (NVIDIA H200)", "cpu"):
        found = analyse(replace(session, info=replace(session.info, devices=devices))).findings
        (finding,) = [each for each in found if each.id == "non-finite-event"]
        # On a CPU the weights were read.
        assert ("Look at the weights of 'fc'" in finding.fix) is (is_by_weights and devices != "cpu")


def test_the_suggested_code_computes_the_norm_in_float32():
    code = found("gradients-clipped-to-zero", clipped(1e10)).code
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
    for parameter in model[0].parameters():
        parameter.grad = torch.full_like(parameter, 300.0)
    exec(code, {"torch": torch, "model": model, "max_norm": 1.0})
    norm = torch.stack([parameter.grad.float().norm() for parameter in model[0].parameters()]).norm()
    assert norm.item() == pytest.approx(1, rel=1e-3)


def test_the_number_of_further_steps_follows_the_first_step():
    figures = {"factor": 0.001, "is_uniform": 1.0, "of": 2.0}
    while_scaled = [Measurement("changed-while-scaled", "w", step, figures, ("w",)) for step in (2, 5, 8)]
    progress = Progress(STEPS, STEPS, 0, STEPS, True, scales=(ScaleChange(0, 1024.0),))
    # A factor of exactly 1/1000 could be an average over micro-batches.
    while_scaled[0] = Measurement("changed-while-scaled", "w", 2, {**figures, "factor": 0.0012}, ("w",))
    assert found("unscale-missing", *while_scaled, progress=progress).message == (
        "In step 2, and in 2 more of the few steps that are checked for this, the gradients were clipped while they were still "
        "multiplied by the loss scale of 1024 (2^10): clipping multiplied them by 0.0012. The limit was meant for the true "
        "gradients, smaller by that scale."
    )


@pytest.mark.parametrize(
    ("broke", "words"),
    [
        (event(1, "forward"), "The update of step 0 made the weights infinite or NaN, as the forward of step 1 shows"),
        (event(0, "forward"), "In step 0 the run was no longer finite."),
        (event(4, "forward", given=True), "In step 4 the run was no longer finite."),
        (event(4), "In step 4 the run was no longer finite."),
    ],
)
def test_only_a_forward_that_broke_by_itself_is_attributed_to_the_last_update(broke, words):
    adam = OptimizerRecord("Adam", {"eps": 1e-8}, {"float16": 10}, {"exp_avg_sq": "float16"})
    precision = Precision({"float16": 10}, optimizers=(adam,))
    assert words in found("epsilon-zero", precision=precision, events=(broke,)).message


def updates(lost):
    return TensorWindow(FINE, 10, lost_updates={"bfloat16": LostUpdates(lost, 100, True)})


def test_all_tensors_with_the_largest_share_of_lost_updates_are_named():
    lost = {"a": 100, "b": 100, "c": 50, "d": 100}
    layers = {weight("w"): FINE} | {TensorKey(name, "update"): updates(share) for name, share in lost.items()}
    assert found("updates-lost", layers=layers).message.endswith("; 100% in 'a', 'b', 'd'.")


@pytest.mark.parametrize(
    ("lost", "weights", "sampled", "is_error"),
    [
        (99, {"bfloat16": 10}, 5, True),
        (98, {"bfloat16": 10}, 5, False),
        (99, {"bfloat16": 10}, 4, False),
        (99, {"bfloat16": 10, "float32": 10}, 5, False),
    ],
)
def test_a_loss_of_nearly_all_updates_is_an_error(lost, weights, sampled, is_error):
    layers = {weight("w"): FINE, TensorKey("w", "update"): updates(lost)}
    others = {"layers": layers, "precision": Precision(weights), "progress": Progress(STEPS, sampled, 0, STEPS, True)}
    finding = found("updates-lost", **others)
    assert finding.severity == ("error" if is_error else "warning")
    assert finding.message.endswith(" the model hardly trains.") is is_error
    constant = Measurement("second-constant", "", 1, {}, ("rsub", "train.py:27", "step of SmallAdam"), "bfloat16")
    cause = found("constant-is-one", constant, **others)
    assert cause.severity == finding.severity
    assert cause.message.endswith(" the model hardly trains.") is is_error
    consequence = found("updates-lost", constant, **others)
    assert (consequence.severity, consequence.fix) == (("info", "") if is_error else ("warning", finding.fix))


def test_all_buffers_of_the_first_broken_module_are_named():
    buffers = ("1.running_mean", "1.running_var", "2.running_var")
    broken = [Measurement("statistics", name, 5, text="not finite, float32") for name in buffers]
    both = found("statistics-broken", *broken)
    assert both.message.startswith("running_mean and running_var of '1' (FP32) have not been finite since step 5: ")
    assert both.message.endswith("gives NaN.")
    variance = found("statistics-broken", broken[1])
    assert variance.message.startswith("running_var of '1' (FP32) has not been finite since step 5: ")
    assert variance.message.endswith("gives one output for all inputs, one with NaN gives NaN.")


@pytest.mark.parametrize(("backoff", "is_static"), [(0.9999999, True), (0.5, False), (None, False)])
def test_a_scaler_with_a_backoff_factor_near_one_is_called_static(backoff, is_static):
    scaler = ScalerRecord("GradScaler", True, 2.0**26, 2000.0, 1.0000001, backoff)
    precision = Precision({"float32": 10}, autocast=("float16",), scalers=(scaler,))
    overflows = tuple(overflow(step, 2.0**26) for step in range(STEPS))
    finding = found("scale-too-high", precision=precision, events=overflows)
    assert ("A backoff_factor of 0.9999999 hardly lowers it" in finding.fix) is is_static


def test_the_factors_of_a_scaler_are_recorded():
    model, scaler = nn.Linear(4, 2), cpu_scaler(65536.0, growth_factor=3.0, backoff_factor=0.25)
    inspector = inspected(model, lambda step: model(torch.ones(3, 4)).sum(), 1, scaler=scaler, optimizers=None)
    (record,) = inspector.session().precision.scalers
    assert (record.growth_factor, record.backoff_factor) == (3.0, 0.25)


def test_torchs_default_initial_scale_is_suggested_if_none_is_needed():
    opening = [overflow(step, 2.0 ** (24 - step)) for step in range(6)]
    layers, progress = {activation("fc"): window_of(spread({-10: 1000}), 10)}, Progress(STEPS, STEPS, 6, STEPS, True)
    report = analyse(session_of(layers, progress=progress, events=opening))
    assert report.loss_scale.needed is False
    finding = next(each for each in report.findings if each.id == "initial-scale-too-high")
    assert finding.fix.startswith("Begin at 65536 (2^16) or lower")
    assert "init_scale=2.0**16" in finding.code
    assert "the scale 1, which is enough, has" in str(report)


# -- the place and the operation of an event --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, "the loss, or the code that leads to it, computes a division by zero"),
        ({"what": "activation", "module": ""}, "the model's own code, or the loss, computes a division by zero"),
        ({"module": "", "of_input": True}, "the model's own code computes a division by zero"),
        (
            {"module": "score"},
            "the code in or before 'score', or next to it on the same input, computes a division by zero",
        ),
    ],
)
def test_the_subject_of_the_sentence_is_the_operations_place(broken, words):
    fields = {"module": "fc", "what": "activation", "after": not broken, **broken}
    happened = Event(8, 0, "backward", tensor="fc", value="nan", forward_finite=True, gradients_finite=False, **fields)
    measured = examined("a division by zero", names=("5",), loss_finite=1.0)
    message = found("argument-out-of-range", measured, events=(happened,)).message
    place = "(1 element, row 5 of the batch). The loss is finite, but its gradient is not."
    assert message.startswith(f"In step 8 {words} {place}")


@pytest.mark.parametrize(
    ("names", "rows", "of_rows", "words"),
    [
        (8, 32, 32, "all 32 rows of the batch"),
        (8, 20, 32, "rows 0, 1, 2, 3, 4, 5, 6, 7, ... of the batch"),
        (8, 8, 32, "rows 0, 1, 2, 3, 4, 5, 6, 7 of the batch"),
        (2, 2, 2, "all 2 rows of the batch"),
        (1, 1, 1, "row 0 of the batch"),
        # An older recording lacks the number of rows.
        (8, None, None, "rows 0, 1, 2, 3, 4, 5, 6, 7, ... of the batch"),
        (2, None, None, "rows 0, 1 of the batch"),
    ],
)
def test_rows_are_listed_or_counted(names, rows, of_rows, words):
    figures = {"elements": 40.0} | ({} if rows is None else {"rows": float(rows), "of_rows": float(of_rows)})
    measured = Measurement("examined-batch", "", 8, figures, tuple(map(str, range(names))))
    assert f"(40 elements, {words})" in found("batch-not-finite", measured).message


def test_a_mask_counts_the_rows_that_it_hides():
    figures = {"elements": 10.0, "rows": 1.0, "of_rows": 16.0}
    masked = Measurement("examined-mask", "attn", 9, figures, ("2",), "a softmax of a row of only -inf")
    message = found("mask-hides-whole-row", masked).message
    told = "a mask hides all scores of 10 rows (index 2 of the first dimension), whose softmax is 0/0, which is NaN."
    assert message == f"In step 9, in 'attn', {told}"


def test_rows_where_finds_the_rows_of_a_condition():
    assert Rows.where(torch.tensor(True)) == Rows((), 0, 0)
    assert Rows.where(torch.tensor([False, True])) == Rows((1,), 1, 2)
    assert Rows.where(torch.ones(20, 2, 3, dtype=torch.bool)) == Rows(tuple(range(8)), 20, 20)


def softmax():
    return torch.tensor([[0.0, 200.0], [1.0, 2.0]], requires_grad=True).softmax(-1)


@pytest.mark.parametrize(
    ("argument", "is_softmax"),
    [
        (lambda: softmax(), True),
        (lambda: softmax().float().clone().clamp_min(0), True),
        (lambda: softmax().gather(1, torch.tensor([[0], [1]])).squeeze(1), True),
        (lambda: softmax()[:, 0], True),
        (lambda: torch.tensor([0.0, 1.0], requires_grad=True), False),
        (lambda: softmax().sub(1).relu(), False),
        (lambda: softmax()[:, 0].tanh(), False),
    ],
)
def test_a_logarithm_of_a_softmax_is_recognised(argument, is_softmax):
    found = singular(argument().log().grad_fn)
    assert found is not None
    assert found.what == ("of zero, the result of a softmax" if is_softmax else "of zero")


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.asinh(x),
        lambda x: torch.acosh(-x),
        lambda x: torch.logcumsumexp(x, 0),
        lambda x: torch.logaddexp(x, x),
    ],
    ids=["asinh", "acosh", "logcumsumexp", "logaddexp"],
)
def test_an_operation_whose_name_begins_like_anothers_has_a_domain_of_its_own(operator):
    given = torch.tensor([-1.5, -3.0], requires_grad=True)
    assert singular(operator(given).grad_fn) is None


def test_log_softmax_is_suggested_for_a_logarithm_of_a_softmax():
    fixes = {}
    for text in ("a logarithm of zero", "a logarithm of zero, the result of a softmax"):
        fixes[text] = found("argument-out-of-range", examined(text), events=(event(8),))
    plain, of_softmax = fixes.values()
    assert of_softmax.code == "# in place of log(x)\ny = torch.log_softmax(logits, -1)\nz = g(y)"
    assert "A clamp would be finite too, but gives the clamped elements no gradient." in of_softmax.fix
    assert plain.code == "# a clamped element gets no gradient\ny = x.clamp_min(1e-6).log()"


@pytest.mark.parametrize("text", ["acos of a magnitude of 1 or more", "exp of a number too large for its result"])
@pytest.mark.parametrize("bits", [16.0, 32.0])
def test_float32_is_suggested_for_an_operation_in_16_bits(text, bits):
    finding = found("argument-out-of-range", examined(text, bits=bits), events=(event(8),))
    assert (".float()" in finding.code) is ("    y = " in finding.code) is (bits == 16)
    names = {"torch": torch, "device_type": "cpu", "x": torch.full((2,), 100.0).to(torch.float16)}
    exec(finding.code, names)
    assert names["y"].dtype is (torch.float32 if bits == 16 else torch.float16)


def test_the_bits_of_a_singular_operation_are_recorded():
    for dtype in (torch.float16, torch.float32, torch.float64):
        made = torch.ones(2, dtype=dtype, requires_grad=True).acos()
        assert singular(made.grad_fn).bits == torch.finfo(dtype).bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_negative_difference_of_rounded_terms_is_told_from_other_negative_numbers(dtype):
    a = torch.randn(4, 3, requires_grad=True)
    products = (a.to(dtype) @ a.to(dtype).T).float()
    squares = a.square().sum(-1)
    root = (squares[:, None] + squares[None] - 2 * products - 1).sqrt()
    other = (-a.to(dtype).square().float()).sqrt()
    rounded = ", a difference of terms rounded to 16 bits" * (dtype == torch.bfloat16)
    assert singular(root.grad_fn).what == f"of a negative number{rounded}"
    assert singular(other.grad_fn).what == "of a negative number"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_zero_is_said_to_be_a_rounded_difference_where_it_is_one(dtype):
    narrow = torch.tensor([0.9999, 0.5], requires_grad=True).to(torch.bfloat16).to(dtype)
    root = singular((2 - 2 * narrow)[:1].sqrt().grad_fn)
    rounded = ", a difference of terms rounded to 16 bits" * (dtype == torch.bfloat16)
    assert root.what == f"of zero{rounded}, where the root's derivative is infinite"
    # The square of a difference may be zero in FP32 too.
    square = singular((narrow - narrow).square().sum().sqrt().grad_fn)
    assert square.what == "of zero, where the root's derivative is infinite"
    fix = found("argument-out-of-range", examined(f"{root.operator} {root.what}"), events=(event(8),)).fix
    assert fix.startswith("Compute the terms of this difference in FP32") is (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_divisor_of_zero_is_said_to_be_a_product_of_rounded_differences_where_it_is_one(dtype):
    square = torch.tensor([0.9999, 0.5], requires_grad=True).to(torch.bfloat16).to(dtype)
    found = singular((square / ((1 - square) * (square + 1))).grad_fn)
    assert found.what == "by zero" + ", a difference of terms rounded to 16 bits" * (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "what"), [(torch.float16, "a sum beyond FP16's largest number, 65504"), (torch.float32, None)]
)
def test_the_logarithm_of_a_sum_that_fp16_cannot_hold_names_the_sum(dtype, what):
    terms = torch.full((2, 40), 2000.0, requires_grad=True)
    found = singular(terms.to(dtype).sum(1).log().grad_fn)
    assert (found and f"{found.operator} {found.what}") == what


@pytest.mark.parametrize("add", [torch.index_add, torch.scatter_add])
@pytest.mark.parametrize(("size", "is_found"), [(5e3, False), (7e3, True)])
def test_an_indexed_sum_that_fp16_cannot_hold_is_found(add, size, is_found):
    """Terms of twelve squares, none of which is beyond FP16's range."""
    terms = torch.full((12, 2), math.sqrt(size), requires_grad=True).half()
    index = torch.zeros(12, dtype=torch.long)
    index = index if add is torch.index_add else index[:, None].expand(12, 2)
    total = add(torch.zeros(3, 2).half(), 0, index, (terms * terms))
    loss = total.relu().float().sum().log()
    found = overflowed(graph([loss.grad_fn], 64))
    assert (found is not None) is is_found
    if is_found:
        assert (found.operator, found.what) == ("an indexed sum", "beyond FP16's largest number, 65504")
        assert (found.elements, found.rows.first) == (2, (0,))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_constant_factor_that_is_not_finite_is_seen_on_either_side(is_first):
    constant, variable = torch.tensor([1.0, torch.inf]), torch.ones(2, requires_grad=True)
    product = constant * variable if is_first else variable * constant
    found = singular(product.grad_fn)
    assert (found.what, found.elements) == ("with a constant that is infinite or NaN", 1)
    assert singular((torch.ones(2) * variable).grad_fn) is None


@pytest.mark.parametrize(
    ("reduce", "what"),
    [
        (lambda x: x[:0].mean(), "of only 0 elements (0/0)"),
        (lambda x: x[:0].mean(-1).sum() + x[:, :0].mean(-1), "of only 0 elements (0/0)"),
        (lambda x: x[:1].std(0), "of only 1 element (0/0)"),
        (lambda x: x[:1].var(0), "of only 1 element (0/0)"),
        (lambda x: x[:2, :1].std(), None),
        (lambda x: x[:1].std(0, correction=0), None),
        (lambda x: x.mean(), None),
        (lambda x: nn.functional.mse_loss(x[:0], torch.zeros(0, 3)), "of only 0 elements (0/0)"),
        (lambda x: nn.functional.mse_loss(x[:0], torch.zeros(0, 3), reduction="sum"), None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_mean_or_deviation_of_too_few_elements_is_named(reduce, what):
    made = reduce(torch.randn(4, 3, requires_grad=True))
    node = made.grad_fn
    nodes = [node, *(following for following, _ in node.next_functions if following is not None)]
    place = next(filter(None, map(singular, nodes)), None)
    assert (place and place.what) == what
    if what is not None:
        measured = examined(f"{place.operator} {place.what}", elements=0.0)
        said = found("argument-out-of-range", measured, events=(event(8),))
        assert f"computes {place.operator} {what}." in said.message
        assert ("drop_last" in said.code) is (place.operator != "a mean")


@pytest.mark.parametrize(("skipped_at", "is_explosion"), [(18, False), (None, True)])
def test_weights_grow_before_a_forward_that_a_scaler_skipped(skipped_at, is_explosion):
    """A head that begins near zero grows in any training; the loss scale fell for the forward until the weights broke."""
    grown = Measurement("weight-growth", "w", 16, {"ratio": 19.0, "began": 1.0, "lr": 0.05})
    beyond = examined("a product beyond FP16's largest number, 65504", step=18)
    events = [event(40)]
    if skipped_at is not None:
        events.insert(0, replace(event(skipped_at, "forward"), skipped=True))
    session = session_of({weight("w"): spread({0: 10})}, events=tuple(events), measurements=(grown, beyond))
    assert ("weights-exploded" in ids(session)) is is_explosion


@pytest.mark.parametrize(("ratio", "is_explosion"), [(19.0, False), (2.0**18, True)])
def test_slow_weight_growth_before_an_argument_out_of_range_is_not_an_explosion(ratio, is_explosion):
    grown = Measurement("weight-growth", "w", 16, {"ratio": ratio, "began": 1.0, "lr": 0.05})
    acos = examined("acos of a magnitude of 1 or more", step=18, elements=7.0)
    session = session_of({weight("w"): spread({0: 10})}, events=(event(18),), measurements=(grown, acos))
    assert ("weights-exploded" in ids(session)) is is_explosion


@pytest.mark.parametrize("log2_scale", [0, 10, 12, 14])
def test_a_larger_loss_scale_is_suggested_for_zeros_at_a_small_one(log2_scale):
    counts = {weight("deep.weight"): spread({}, zeros=1000), weight("head.weight"): spread({-8: 1000})}
    rounded = {"passed_through": "float16", "floor_exponent": -24 - log2_scale}
    layers = {key: window_of(histogram, **rounded) for key, histogram in counts.items()}
    progress = Progress(8, 8, 0, 8, True, scales=(ScaleChange(0, 2.0**log2_scale),))
    precision = Precision(weights={"float32": 10}, autocast=("float16",))
    report = analyse(session_of(*[layers] * 8, progress=progress, precision=precision))
    findings = {each.id: each for each in report.findings}
    finding, raised = findings["gradients-all-zero"], report.loss_scale.recommended
    if log2_scale == 0:
        # The missing scaler explains the zeros.
        missing = findings["scaler-missing-in-float16"]
        assert (finding.severity, finding.fix, missing.severity) == ("info", "", "warning")
        assert f"init_scale=2.0**{math.log2(raised):.0f}" in missing.code
        return
    is_far = raised >= 256 * 2.0**log2_scale
    assert finding.fix.startswith(f"Raise the loss scale to {raised:.0f}") is is_far
    assert (f"device_type, init_scale={raised:.0f}\n" in finding.code) is is_far


BATCH = Measurement("examined-batch", "", 4, {"elements": 16.0, "rows": 1.0, "of_rows": 64.0}, ("0",))


@pytest.mark.parametrize(
    ("events", "watched", "words"),
    [
        ([(4, True)], None, "The model's input was finite in all other steps."),
        ([(4, True), (5, True), (9, True)], None, "The model's input was not finite in 2 further steps."),
        ([(4, True), (9, True)], 10, "The model's input was not finite in 1 further step."),
        # The weights may be broken, and hide the input.
        ([(4, True), (5, False)], None, "the model did not make them."),
        ([(4, True)], 10, "the model did not make them."),
    ],
)
def test_further_steps_with_a_batch_that_is_not_finite_are_counted(events, watched, words):
    events = tuple(event(step, "forward", given=given, skipped=True) for step, given in events)
    progress = Progress(STEPS, STEPS, 0, STEPS, True, watched_steps=watched)
    assert found("batch-not-finite", BATCH, events=events, progress=progress).message.endswith(words)


def test_the_code_leaves_out_the_samples_that_are_not_finite():
    code = found("batch-not-finite", BATCH, events=(event(4, "forward", given=True),)).code
    loop = f"for batch, target in loader:\n{indent(code, '    ')}\n    seen.append((batch, target))"
    one = torch.arange(12.0).reshape(4, 3)
    one[1, 2] = math.nan
    names = {"torch": torch, "seen": [], "loader": [(one, torch.arange(4)), (one * math.nan, torch.arange(4))]}
    exec(loop, names)
    ((batch, target),) = names["seen"]
    assert torch.equal(batch, torch.arange(12.0).reshape(4, 3)[[0, 2, 3]])
    assert target.tolist() == [0, 2, 3]
    targets = Measurement("examined-target", "", 4, {"elements": 1.0, "rows": 1.0, "of_rows": 4.0}, ("1",))
    code = found("batch-not-finite", targets, events=(event(4, "forward", what="loss", given=False),)).code
    names |= {"seen": [], "loader": [(torch.ones(4, 3), torch.tensor([1.0, math.inf, 2.0, 3.0]))]}
    exec(f"for batch, target in loader:\n{indent(code, '    ')}\n    seen.append((batch, target))", names)
    assert names["seen"][0][1].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("broken", "has_code"), [(3, True), (9, True), (10, False), (20, False)])
def test_skipping_steps_is_not_suggested_if_half_of_them_break(broken, has_code):
    replaced = Measurement("replaced-before-step", "w", 0, {"of": 1.0}, ("w",))
    finding = found("gradients-replaced", replaced, events=tuple(map(event, range(broken))))
    assert bool(finding.code) is has_code
    assert (f"they occur in {broken} of 20 steps" in finding.fix) is not has_code


@pytest.mark.parametrize(("dtypes", "is_spared"), [(("float32",), True), (("float16",), False)])
def test_overflowing_sums_need_no_fix_if_the_tensor_is_float32(dtypes, is_spared):
    layers = {weight("w"): TensorWindow(spread({10: 100_000}), 10, dtypes=dtypes, passed_through="float16")}
    finding = found("reductions-overflow", layers=layers)
    assert finding.message.endswith("The run holds it in FP32.") is is_spared
    assert (finding.fix == "") is is_spared


@pytest.mark.parametrize(("scales", "words"), [((64, 32, 16, 8), "fell each time"), ((64, 64, 32, 32), "never grew")])
def test_recurring_overflows_are_reported_with_their_steps(scales, words):
    events = [overflow(step, scale, "2", after=True) for step, scale in zip((5, 8, 11, 14), scales, strict=True)]
    scaler = ScalerRecord("GradScaler", True, 64.0, 2000.0)
    precision = Precision({"float32": 10}, autocast=("float16",), scalers=(scaler,))
    finding = found("overflow-recurs", precision=precision, events=tuple(events))
    began = "Every 3 steps (5, 8, 11, ...) the gradients overflow in the code after '2', although the scale"
    assert finding.message.startswith(f"{began} {words}")
    assert finding.fix.startswith("In steps 5, 8, 11, ... look for an outlier")
    assert "if step in (5, 8, 11):" in finding.code


@pytest.mark.parametrize(("steps", "is_told"), [((5, 106, 207, 265), False), ((5, 45, 85, 190), True)])
def test_overflows_between_which_the_scale_grows_do_not_recur(steps, is_told):
    """A scaler that grows every 100 steps overflows at the same scale again."""
    events = tuple(overflow(step, 64, "2") for step in steps)
    scaler = ScalerRecord("GradScaler", True, 64.0, 100.0)
    precision = Precision({"float32": 10}, autocast=("float16",), scalers=(scaler,))
    progress = Progress(1000, 1000, 0, 1000, True)
    session = session_of({weight("w"): FINE}, progress=progress, precision=precision, events=events)
    assert ("overflow-recurs" in ids(session)) == is_told


def packed_in(dtype):
    """Return hooks that pack saved tensors in a dtype, and the widest value as an activation that overflows FP16."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: (x.dtype, x.to(dtype)), lambda kept: kept[1].to(kept[0]))


@pytest.mark.parametrize(
    ("dtype", "value", "elements"),
    [(torch.float16, 7e4, 1), (torch.float16, 6e4, None), (torch.bfloat16, 7e4, None), (torch.float32, math.inf, None)],
)
def test_a_saved_tensor_that_hooks_pack_beyond_the_end_of_their_format_is_found(dtype, value, elements):
    x = torch.tensor([1.0, value], requires_grad=True)
    with packed_in(dtype):
        node = x.square().grad_fn
    found = overflowed_pack(node)
    assert (found and found.elements) == elements
    # Without hooks nothing is packed.
    assert overflowed_pack(x.square().grad_fn) is None


def test_a_backward_of_packed_tensors_is_named_with_a_wider_format():
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2))

    def loss(step):
        with packed_in(torch.float16):
            return (model(torch.full((3, 4), 7e4 if step == 2 else 1.0)) * 1e-6).sum()

    inspector = inspected(model, loss, 4, lr=1e-3, optimizers=None)
    finding = next(each for each in inspector.report().findings if each.id == "argument-out-of-range")
    assert (finding.severity, finding.step) == ("error", 2)
    assert "from a saved tensor that hooks packed in float16, where it is not finite (12 elements" in finding.message
    assert "The loss is finite, but its gradient is not." in finding.message
    assert "torch.bfloat16" in finding.code
