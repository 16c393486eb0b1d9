"""Gradients that are mostly rounding error, weights that an optimizer's own arithmetic breaks, and data that 16 bits blur."""

import math
import re
from functools import partial

import pytest
import torch
import trainings
from agreeing_reports import analyse
from analysis_sessions import session_of, spread, weight
from models import Of
from torch import nn
from trainings import cpu_scaler, sgd, take_step

from mpinspect import Inspector
from mpinspect.ranges.records import GradientsError


def linear(*widths):
    torch.manual_seed(0)
    return nn.Linear(*widths)


def inspected(model, loss_of, steps=4, lr=1e-3, optimizer=None, second=(1,)):
    """Train under the inspector; return the findings by id, and the session."""
    session = trainings.inspected(model, loss_of, steps, lr=lr, optimizer=optimizer, second=second).session()
    return {finding.id: finding for finding in analyse(session).findings}, session


class Rebuilt(torch.autograd.Function):
    """Doubles and halves its input some times in the backward; each subtraction of nearly equal numbers doubles the error."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.save_for_backward(x)
        ctx.times = times
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        rebuilt = x / 3 * 3
        for _ in range(ctx.times):
            rebuilt = 3 * rebuilt - 2 * x
        return gradient * (rebuilt / x), None


def rebuilding(times):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(Rebuilt.apply(self.entry(x), times)).float()

    return Of(forward, entry=nn.Linear(16, 32), head=nn.Linear(32, 4))


@pytest.mark.parametrize(("times", "severity"), [(1, None), (12, "error")])
def test_gradients_that_are_mostly_rounding_error_name_the_line_at_which_the_errors_grow(times, severity):
    model = rebuilding(times)
    found, _ = inspected(model, lambda step: model(torch.randn(64, 16)).square().mean(), lr=1e-4)
    assert {each: found[each].severity for each in found if each == "gradients-inaccurate"} == (
        {"gradients-inaccurate": severity} if severity else {}
    )
    if severity:
        finding = found["gradients-inaccurate"]
        assert (finding.step, finding.certainty) == (1, "measured")
        line = Rebuilt.backward.__code__.co_firstlineno + 5
        assert finding.evidence["line"] == f"test_wrong_gradients.py:{line}"
        assert "backward of Rebuilt" in finding.message
        # The gradients of the head do not pass through it.
        assert finding.evidence["of"] == 4
        assert finding.evidence["off"] == 2


class Rooted(torch.optim.Optimizer):
    """Divides by the root of a matrix that is indefinite from its third step on."""

    def __init__(self, parameters, dtype):
        super().__init__(parameters, {"dtype": dtype})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["sum"] = torch.ones(4, dtype=self.param_groups[0]["dtype"])
                state["root"] = torch.ones(4)
            state["sum"] -= 0.4
            state["root"] = state["sum"].float().pow(-0.5)
            parameter.sub_(1e-3 * parameter.grad * state["root"].mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_the_optimizers_own_arithmetic_breaks_name_its_step_and_its_states(dtype):
    model = linear(8, 8)
    optimizer = Rooted(model.parameters(), dtype)
    found, _ = inspected(model, lambda step: model(torch.randn(16, 8)).square().mean(), steps=6, optimizer=optimizer)
    finding = found["weights-broken-by-step"]
    assert (finding.severity, finding.certainty, finding.step) == ("error", "inferred", 2)
    assert finding.evidence["states"] == ["root"]
    assert ("Rooted keeps 'sum' in BF16" in finding.message) == (dtype is torch.bfloat16)
    assert found.keys() & {"non-finite-event", "breaks-in-fp32-too"} <= {
        each for each in found if found[each].severity == "info"
    }


def test_weights_that_infinite_gradients_break_are_not_the_optimizers_fault():
    model = linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(step):
        return (model(torch.randn(16, 8)).square().mean() * (torch.inf if step == 2 else 1.0)).clamp_max(1e30)

    found, _ = inspected(model, loss, steps=6, optimizer=optimizer)
    assert "weights-broken-by-step" not in found


@pytest.mark.parametrize("step_of_nan", [1, 6])
@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "SGD without momentum"])
def test_gradients_that_the_loop_breaks_after_the_check_are_told_from_an_optimizers_own_arithmetic(
    kind, has_scaler, step_of_nan
):
    model = linear(8, 8)
    if kind == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 * (kind == "SGD"))
    scaler = cpu_scaler(4.0, enabled=has_scaler)
    with Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step == step_of_nan:
                model.weight.grad[0] = torch.nan
            scaler.step(optimizer)
            scaler.update()
    found = {finding.id: finding for finding in analyse(inspector.session()).findings}
    # Step 1 is measured. In step 6 the optimizer's mean of the gradients shows what it got.
    is_known = step_of_nan == 1 or kind != "SGD without momentum"
    assert ("gradients-broken-after-check" in found) == is_known
    if is_known:
        cause = found["gradients-broken-after-check"]
        certainty = "measured" if step_of_nan == 1 else "inferred"
        assert (cause.severity, cause.step, cause.certainty) == ("error", step_of_nan, certainty)
        assert ("scaler.unscale_()" in cause.fix) == has_scaler
        assert not any(each.id == "weights-broken-by-step" and each.severity == "error" for each in found.values())


@pytest.mark.parametrize(
    ("values", "kept_in", "is_found"),
    [
        (lambda: 50 + 0.01 * torch.randn(4000), torch.float16, True),
        (lambda: 50 + 0.01 * torch.randn(4000), torch.float32, False),
        (lambda: 5 + 0.03 * torch.randn(4000), torch.bfloat16, True),
        # Wide data, whole numbers and a constant lose nothing that matters.
        (lambda: 50 + 10 * torch.randn(4000), torch.float16, False),
        (lambda: 2000.0 + torch.randint(2, (4000,)), torch.float16, False),
        (lambda: torch.full((4000,), 0.3), torch.float16, False),
    ],
)
@pytest.mark.parametrize("widened", [False, True], ids=["in its dtype", "cast to FP32"])
def test_data_that_16_bits_blur_before_their_centre_is_subtracted_are_reported(values, kept_in, is_found, widened):
    exact = values()
    data, mean, std = exact.to(kept_in), float(exact.mean()), float(exact.std()) + 1e-6
    model = nn.Linear(8, 1)

    def loss(step):
        rows = data[torch.randint(4000, (64, 8))]
        x = ((rows.float() if widened else rows) - mean) / std
        return model(x.float()).square().mean()

    found, _ = inspected(model, loss)
    # A number subtracted from FP16 may be rounded to FP16 itself, which is measured.
    rounded = [each for each in found.values() if each.id == "result-is-rounding-error"]
    assert [each.severity for each in rounded if each.certainty == "inferred"] == ["warning"] * is_found


def test_gradients_that_a_clip_divides_by_millions_are_not_lost():
    model = linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for limit, is_lost in ((1.0, False), (1e-6, True)):
        with Inspector(model, optimizers=optimizer) as inspector:
            for _ in range(6):
                optimizer.zero_grad()
                (1e9 * model(torch.randn(16, 8))).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
        found = {finding.id for finding in analyse(inspector.session()).findings if finding.severity != "info"}
        assert ("gradients-zeroed" in found) == is_lost


def test_a_model_that_is_cast_after_its_training_is_recorded_as_it_was_trained():
    model = linear(8, 8)
    optimizer = sgd(model, 1e-3)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(4):
            take_step(optimizer, model(torch.randn(16, 8)).square().mean())
        model.half().requires_grad_(False)
    assert dict(inspector.session().precision.weights) == {"float32": 72}


def test_a_step_with_a_further_backward_is_computed_twice_if_it_recurs():
    model = linear(8, 8)
    optimizer = sgd(model, 1e-3)
    with Inspector(model, optimizers=optimizer, second=True) as inspector:
        for step in range(20):
            for _ in range(1 + (step % 5 == 0)):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(16, 8)).square().mean()
                loss.backward()
            optimizer.step()
    steps = {each.step for each in inspector.session().measurements if each.what == "second-lines"}
    assert steps == {1, 15}


def test_an_error_that_a_cast_begins_names_the_cast_and_the_line_at_which_it_grows():
    model = linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(step):
        with torch.autocast("cpu", torch.bfloat16):
            value = model(torch.randn(64, 8)).float()
        rates, total = torch.full((64, 1), 0.999).bfloat16(), torch.ones(64, 1)
        for _ in range(2000):
            total = rates.float() * total
        return (value - 10 * total).square().mean()

    found, _ = inspected(model, loss, optimizer=optimizer)
    finding = found["gradients-inaccurate"]
    first = loss.__code__.co_firstlineno
    assert f"test_wrong_gradients.py:{first + 3}, where a cast rounds to BF16" in finding.message
    assert finding.evidence["line"] == f"test_wrong_gradients.py:{first + 5}"


@pytest.mark.parametrize(
    ("records", "where", "step"),
    [
        ([(1, 0.04, 1.0, 0.0), (31, 0.9, 1.0, 0.0)], ("block", "forward"), 31),
        # Of a model that has converged.
        ([(1, 0.04, 1.0, 0.0), (31, 0.9, 0.01, 0.0)], ("block", "forward"), None),
        # The backward or the loop flushed the gradients, or the backward multiplied by a zero of the forward.
        ([(1, 0.9, 1.0, 0.8)], ("block", "backward"), None),
        ([(1, 0.9, 1.0, 0.8)], ("", "forward"), None),
        ([(1, 0.9, 1.0, 0.8)], ("block", "forward"), 1),
    ],
)
def test_errors_of_small_gradients_and_zeros_of_the_backward_are_not_reported(records, where, step):
    name, phase = where
    place = {"name": name, "names": ("mul", "train.py:7", phase), "text": "bfloat16", "off": 3, "of": 4, "share": 0.9}
    measured = [
        GradientsError(step=at, error=error, size=size, zeroed=zeroed, **place).measurement()
        for at, error, size, zeroed in records
    ]
    session = session_of({weight("w"): spread({-3: 1000})}, measurements=measured)
    found = [each.step for each in analyse(session).findings if each.id == "gradients-inaccurate"]
    assert found == [step] * (step is not None)


def test_errors_that_grow_in_all_layers_alike_are_information():
    layers = [each for _ in range(24) for each in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))

    def loss(step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(8, 32)).float().square().mean()

    found, session = inspected(model, loss, lr=1e-4)
    assert found["gradients-inaccurate"].severity == "info"
    assert "grow in many layers alike" in found["gradients-inaccurate"].message
    assert "rounding put the gradients off" not in " ".join(analyse(session).verdict.sentences)


def test_a_healthy_verdict_says_by_how_much_rounding_put_the_gradients_off():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(64, 8)).float().square().mean()

    _, session = inspected(model, loss, second=(1, 2))
    errors = [each.figures["error"] for each in session.measurements if each.what == "second-gradients"]
    assert 0 < max(errors) < 0.05
    said = " ".join(analyse(session).verdict.sentences)
    (off,) = re.findall(r"In 2 steps computed twice, rounding put the gradients off by at most ([\d.]+)%", said)
    assert float(off) == pytest.approx(100 * max(errors), rel=0.05)


@pytest.mark.parametrize(("scale", "is_found"), [(1.0, True), (2.0**20, False)])
def test_signs_of_flushed_gradients_are_reported(scale, is_found):
    model = linear(32, 1)

    def loss(step):
        x = torch.randn(64, 32, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            of_x = 1e-7 * model(x).float().sum()
        (gradient,) = torch.autograd.grad(of_x * scale, x)
        with torch.autocast("cpu", torch.float16):
            return model(x.detach() + gradient.sign()).float().square().mean()

    found, _ = inspected(model, loss)
    rounded = [each for each in found.values() if each.id == "result-is-rounding-error"]
    signs = [each for each in rounded if each.evidence["operator"] == "sign"]
    assert len(signs) == is_found
    assert all("a sign is 0 for numbers that were flushed to zero" in each.message for each in signs)


def test_gradients_asked_of_an_input_are_not_backwards_whose_gradients_are_lost():
    model = linear(8, 1)
    optimizer = sgd(model, 1e-3)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(20):
            x = torch.randn(16, 8, requires_grad=True)
            (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
            optimizer.zero_grad()
            model(x.detach() + gradient.sign()).square().mean().backward()
            optimizer.step()
    assert "gradients-zeroed" not in {each.id for each in analyse(inspector.session()).findings}


@pytest.mark.parametrize("has_plateau", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_schedule_that_stops_the_training_and_a_number_read_in_16_bits_are_reported_together(dtype, has_plateau):
    model = linear(8, 1)
    optimizer = sgd(model, 1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if has_plateau else None

    def loss(step):
        of_batch = model(torch.randn(64, 8)).square().mean()
        float(of_batch.detach().to(dtype))
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 4 else 1e-12
        return of_batch

    found, _ = inspected(model, loss, steps=40, optimizer=optimizer)
    finding, is_plateau = found["weights-stand-still"], dtype is torch.bfloat16 and schedule is not None
    assert ("The loop reads a number in BF16" in finding.message) == is_plateau
    assert ("Another precision does not change that" in finding.message) == (not is_plateau)
    assert finding.certainty == ("inferred" if is_plateau else "measured")


class Adam8(torch.optim.Optimizer):
    """Keeps its averages in lists, and those of squares in 8 bits, where small ones are zero."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            zeros = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            state = self.state[parameter].setdefault("averages", zeros)
            state[0].lerp_(parameter.grad, 0.1)
            state[1].lerp_(parameter.grad.square(), 0.001)
            largest = state[1].max()
            squares = (state[1] / largest * 255).round() / 255 * largest
            parameter.addcdiv_(state[0], squares.sqrt() + 1e-8, value=-1e-2)


@pytest.mark.parametrize(("make", "is_found"), [(Adam8, True), (partial(torch.optim.AdamW, lr=1e-2), False)])
def test_weights_that_an_8_bit_adam_moves_far_are_reported_though_the_loss_is_finite(make, is_found):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = make(model.parameters())
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(6):
            take_step(optimizer, model(torch.randn(16, 64) * torch.logspace(-4, 0, 64)).tanh().square().mean())
            if step == 2 and not is_found:
                # As a codebook that the script fills with data.
                model[0].weight.data.mul_(100)
    found = {each.id: each for each in analyse(inspector.session()).findings}
    assert ("weights-exploded" in found) == is_found
    if is_found:
        assert "times the learning rate; Adam8 should move them" in found["weights-exploded"].message


@pytest.mark.parametrize(("factor", "is_scale"), [(512.0, True), (2.0, False)])
def test_a_constant_factor_of_all_losses_is_taken_for_a_loss_scale_if_it_is_large(factor, is_scale):
    model = linear(8, 1)

    def loss(step):
        with torch.autocast("cpu", torch.float16):
            output = model(torch.randn(16, 8))
        return output.float().square().mean() * factor

    found, _ = inspected(model, loss, steps=10, lr=1e-2 / factor)
    assert ("scaler-missing-in-float16" in found) is not is_scale


@pytest.mark.parametrize(
    ("make", "is_found"),
    [
        (lambda actions, values: torch.zeros_like(actions), True),
        (lambda actions, values: torch.zeros_like(values), False),
        (lambda actions, values: torch.zeros(16, dtype=torch.int32), True),
        # Quantised on purpose.
        (lambda actions, values: torch.zeros(16, dtype=torch.uint8), False),
    ],
)
@pytest.mark.parametrize("offset", [0.5, 0.0], ids=["fractions", "whole numbers"])
def test_fractions_that_are_written_into_a_tensor_of_integers_are_reported(make, is_found, offset):
    model = linear(8, 1)

    def loss(step):
        actions, values = torch.randint(4, (16,)), torch.arange(16.0) + offset
        returns = make(actions, values)
        returns[:] = values
        return (model(torch.randn(16, 8))[:, 0] - returns.float()).square().mean()

    found, _ = inspected(model, loss)
    is_found = is_found and bool(offset)
    assert ("integers-rounded" in found) == is_found
    if is_found:
        assert "16 of 16 numbers" in found["integers-rounded"].message
        assert "0.5 became 0" in found["integers-rounded"].message


@pytest.mark.parametrize(("sizes", "is_found"), [((1.0, 1e-5), True), ((1.0, 1e-9), False), ((1.0, 1.0), False)])
def test_small_gradients_that_an_exchange_in_fp16_flushes_are_reported_unless_they_are_rounding(sizes, is_found):
    model = nn.ParameterList([torch.randn(64) for _ in sizes])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Inspector(model, optimizers=optimizer, second=(1,)) as inspector:
        for _ in range(4):
            optimizer.zero_grad()
            torch.zeros(4, dtype=torch.int64).copy_(torch.tensor([math.nan, math.inf, math.nan, 1.0]))
            losses = (1e-3 * size * (each * torch.randn(64)).sum() for each, size in zip(model, sizes, strict=True))
            sum(losses).backward()
            with torch.no_grad():
                for each in model:
                    each.grad = each.grad.half().float()
            optimizer.step()
    found = {each.id: each for each in analyse(inspector.session()).findings}
    finding = found.get("gradients-flushed-before-step")
    assert (finding is not None) == is_found
    if finding is not None:
        assert "These are most of the gradients of 1 of 2 weights" in finding.message


def test_gradients_that_cancel_over_a_batch_are_not_reported():
    x = torch.randn(256, 16)
    target = x @ torch.randn(16, 1) + 0.1 * torch.randn(256, 1)
    model = nn.Linear(16, 1)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, target).solution.T)
        model.bias.zero_()

    def loss(step):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        return (output.float() - target).square().mean()

    found, session = inspected(model, loss, lr=1e-6)
    assert max(each.figures["error"] for each in session.measurements if each.what == "second-gradients") > 0.5
    assert found.get("gradients-inaccurate") is None


@pytest.mark.parametrize(
    ("columns", "is_found"),
    [
        (lambda y: y, True),
        (lambda y: y[:, 0], False),
        (lambda y: y[:, 0].unsqueeze(1), False),
        (lambda y: y[:8], False),
    ],
    ids=["column", "vector", "unsqueezed", "other length"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_column_less_a_vector_is_reported_unless_it_was_made_on_purpose(columns, is_found, swapped):
    model = linear(8, 1)

    def loss(step):
        predicted, target = columns(model(torch.randn(16, 8))), torch.randn(16)
        difference = target - predicted if swapped else predicted - target
        return difference.square().mean()

    found, _ = inspected(model, loss)
    assert ("difference-broadcasts" in found) == is_found
    if is_found:
        assert (found["difference-broadcasts"].certainty, found["difference-broadcasts"].evidence["rows"]) == (
            "inferred",
            16,
        )


@pytest.mark.parametrize(
    ("dtype", "momentum", "is_found"),
    [(torch.bfloat16, 0.005, True), (torch.bfloat16, 0.1, False), (None, 0.005, False)],
)
def test_running_statistics_that_stand_still_far_from_those_of_the_batches_are_reported(dtype, momentum, is_found):
    model = nn.Sequential(nn.BatchNorm1d(16, momentum=momentum), linear(16, 1)).to(dtype)
    # After many steps FP32's statistics would be those of the batches.
    model[0].running_mean.fill_(4.0)

    def loss(step):
        x = 4.4 + torch.randn(4096, 16)
        return model(x.to(dtype)).float().square().mean()

    found, _ = inspected(model, loss)
    assert ("buffer-stops-changing" in found) == is_found
    if is_found:
        assert "'0.running_mean'" in found["buffer-stops-changing"].message


@pytest.mark.parametrize(("away", "is_found"), [(200.0, True), (0.0, False)])
@pytest.mark.parametrize("options", [{"dim": 1, "largest": False}, {"dim": 1}, {}], ids=str)
def test_a_top_k_of_rounded_distances_is_reported_if_it_takes_others_than_the_best(away, is_found, options):
    model = linear(2, 4)

    def loss(step):
        points = away + torch.rand(256, 2)
        with torch.autocast("cpu", torch.bfloat16):
            products = points @ points.T
        squares = points.square().sum(1)
        distances = squares[:, None] + squares[None, :] - 2 * products
        near = (distances if "largest" in options else -distances).topk(4, **options).indices
        return model(points - away)[near].mean(1).square().mean()

    found, _ = inspected(model, loss)
    assert ("choices-differ" in found) == is_found
    if is_found:
        assert found["choices-differ"].evidence["best"] == 4


@pytest.mark.parametrize(("scale", "is_found"), [(2.0**13, True), (1.0, False)])
def test_an_overflow_after_the_backward_that_spoils_gradients_is_reported(scale, is_found):
    model = linear(64, 64).half()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    with Inspector(model, optimizers=optimizer, second=[1], loss_scale=scale) as inspector:
        for _ in range(4):
            model.zero_grad()
            (model(torch.randn(64, 64).half()).float().square().mean() * scale).backward()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                norm = parameter.grad.square().sum().sqrt()
                parameter.grad.mul_((scale / norm).clamp(max=1.0))
                master.grad = parameter.grad.float() / scale
            optimizer.step()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.data.copy_(master)
    found = {finding.id: finding for finding in inspector.report().findings}
    assert ("overflow-in-operator" in found) == is_found
    if is_found:
        assert found["overflow-in-operator"].severity != "info"


def test_a_difference_is_not_blamed_for_the_gradient_of_a_weight_that_it_does_not_depend_on():
    """As in PPO: the ratio of probabilities is near 1, and its gradient is right; the value's gradient is nearly zero."""
    model = Of(lambda self, x: self.policy(x), policy=linear(16, 64), value=nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.value.weight, 1.004)

    def loss(step):
        x = torch.randn(64, 16)
        with torch.autocast("cpu", torch.bfloat16):
            scores, value = model(x), model.value(torch.ones(64, 1))
        before = torch.nn.functional.linear(x, model.policy.weight, model.policy.bias).detach() + 1e-4
        return (scores.float() - before).exp().mean() + (value.float() - 0.9999).square().mean()

    found, _ = inspected(model, loss)
    assert found["result-is-rounding-error"].severity == "info"


@pytest.mark.parametrize(("impossible", "is_found"), [(torch.finfo(torch.float16).min, True), (-1e4, False)])
def test_a_number_for_minus_infinity_that_breaks_a_backward_is_no_mask(impossible, is_found):
    """A forward recursion in FP16: -65504 and a little less is -inf, and the sum of two such exponentials has no derivative."""
    model = linear(8, 4)
    optimizer, scaler = sgd(model), cpu_scaler(2.0**8)
    with Inspector(model, optimizers=optimizer, second=[1]) as inspector:
        for _ in range(3):
            scores = model(torch.ones(2, 8)).half() - 40
            alpha = torch.full((2, 4), impossible, dtype=torch.float16) + scores
            loss = torch.logaddexp(alpha, alpha).float().clamp(min=-50).mean() + scores.float().square().mean()
            take_step(optimizer, loss, scaler)
    found = {finding.id: finding for finding in inspector.report().findings}
    is_named = "overflow-in-operator" in found and found["overflow-in-operator"].severity != "info"
    assert is_named == is_found
