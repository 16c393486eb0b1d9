"""FP32's own rounding, measured by a computation of the same step in FP64."""

import copy

import pytest
import torch
from models import Of
from torch import nn
from trainings import cpu_scaler, inspected, take_step

import mpinspect
from mpinspect.ranges.capture.steps import StepChoice

F = nn.functional


def squares(model, x):
    return model(x).square().mean()


def trend(degree, start):
    """Fit polynomials by normal equations, far from zero."""

    def forward(self, x):
        grid = start + torch.arange(32, dtype=x.dtype) / 4
        powers = torch.stack([grid**k for k in range(degree + 1)], dim=-1)
        fit = powers @ (torch.linalg.inv(powers.mT @ powers) @ powers.mT @ x.mT)
        return self.linear(x - fit.mT)

    return Of(forward, linear=nn.Linear(32, 8))


def gradients(model, x):
    squares(model, x).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize(("degree", "start"), [(2, 1000.0), (2, 400.0), (2, 2400.0)])
def test_the_error_of_the_gradients_is_that_of_the_same_step_in_float64(degree, start):
    model, x = trend(degree, start), torch.randn(16, 32)
    wide = copy.deepcopy(model).double()
    in_fp32, exact = gradients(copy.deepcopy(model), x), gradients(wide, x.double())
    (found,) = mpinspect.second_opinion(model, squares, x)
    assert (found.id, found.layer, found.evidence["operator"]) == ("fp32-too-coarse", "", "linalg_inv_ex")
    error = float((in_fp32 - exact).norm() / exact.norm())
    assert found.evidence["error"] == pytest.approx(error, rel=1e-3)
    assert found.severity == ("error" if error >= 1 else "warning")
    assert "powers.mT @ powers" in found.code


@pytest.mark.parametrize(
    ("centre", "mode", "is_found"),
    [
        (5e6, "use_mm_for_euclid_dist", True),
        (5e6, "donot_use_mm_for_euclid_dist", False),
        (0.0, "use_mm_for_euclid_dist", False),
    ],
)
def test_distances_that_are_the_difference_of_large_squares_are_reported(centre, mode, is_found):
    points = centre + 1000 * torch.rand(40, 2)

    def loss(model, points):
        return squares(model, torch.cdist(points[:30], points, compute_mode=mode) / 1000)

    found = mpinspect.second_opinion(nn.Linear(40, 1), loss, points)
    assert [each.id for each in found] == ["fp32-too-coarse"] * is_found
    for each in found:
        assert each.evidence["operator"] == "_euclidean_dist"
        assert "donot_use_mm_for_euclid_dist" in each.code


def spread(self, x):
    """Return the square root of a mean of squares less the square of a mean."""
    variance = (x * x).mean(-1) - x.mean(-1) ** 2
    return variance.sqrt()


def spreads():
    return Of(lambda self, x: self.head(self.spread(x)), spread=Of(spread), head=nn.Linear(8, 1))


@pytest.mark.parametrize(("centre", "is_broken"), [(1e5, True), (0.0, False)])
def test_a_nan_that_fp64_does_not_have_has_the_line_at_which_the_errors_grew(centre, is_broken):
    x = centre + torch.randn(64, 8, 16)
    found = mpinspect.second_opinion(spreads(), squares, x)
    assert [each.id for each in found if each.id != "result-is-rounding-error"] == ["fp32-too-coarse"] * is_broken
    for each in found[:1]:
        assert (each.layer, each.evidence["operator"]) == ("spread", "sqrt")
        in_fp32 = (x * x).mean(-1) - x.mean(-1) ** 2
        assert each.evidence["elements"] == float((in_fp32 < 0).sum())
        assert "(x * x).mean(-1) - x.mean(-1) ** 2" in each.code


@pytest.mark.parametrize(("size", "is_found"), [(1e-4, True), (0.1, False)])
def test_a_determinant_that_fp32_flushes_is_named_with_its_value_in_fp64(size, is_found):

    def loss(model, x):
        spread = model(x).square() + 1
        return torch.det(spread[:, None] * size * torch.eye(16)).clamp_min(1e-38).log().mean()

    found = mpinspect.second_opinion(nn.Linear(16, 16), loss, torch.randn(4, 16))
    assert [each.id for each in found] == ["fp32-too-coarse"] * is_found
    for each in found:
        assert (each.evidence["operator"], each.evidence["elements"]) == ("_linalg_det", 4)
        assert 0 < each.evidence["largest"] < 1.5e-45
        assert "slogdet" in each.code


def loss_of(dtype):
    def loss(model, x):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return model(x).float().square().mean()

    return loss


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_not_an_error_of_fp32(dtype):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4), nn.Softmax(-1))
    assert mpinspect.second_opinion(model, loss_of(dtype), torch.randn(32, 16)) == ()


@pytest.mark.parametrize(
    "function",
    [
        # The signs of singular vectors, and of the columns of Q, are arbitrary.
        lambda x: torch.linalg.svd(x).Vh,
        lambda x: torch.linalg.qr(x).Q,
        lambda x: torch.linalg.eigh(x @ x.mT).eigenvectors,
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: x.argsort(-1).float() + x,
        lambda x: F.dropout(x, 0.5),
        lambda x: x + (x.round() - x).detach(),
        lambda x: torch.where(x > 0, x, x.detach()),
        lambda x: x.double().cumsum(0).float(),
        lambda x: x.masked_fill(torch.eye(16).bool(), -torch.inf).softmax(-1),
    ],
)
def test_functions_that_need_not_agree_to_the_last_bit_raise_no_alarm(function):
    model = nn.Linear(16, 16)
    found = mpinspect.second_opinion(
        model, lambda model, x: function(model(x)).square().mean() * 3, torch.randn(16, 16)
    )
    assert [each.id for each in found if each.id == "fp32-too-coarse"] == []


def trained(second, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
    with mpinspect.Inspector(model, second=second) as inspector:
        for _ in range(3):
            loss = loss_of(dtype)(model, torch.randn(32, 8))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return model, inspector.session()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_and_clipped_gradients_have_errors_of_fp32_alone_and_the_training_stays(dtype):
    model, session = trained([1], dtype)
    errors = {each.text: each.figures["error"] for each in session.measurements if each.what == "second-gradients"}
    assert 0 < errors["float32"] < 1e-5 < 1e-4 < errors[str(dtype).removeprefix("torch.")]
    plain, _ = trained(False, dtype)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert session.notes == ()


class EditingSGD(torch.optim.SGD):
    """Changes the gradients in place before it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(each, alpha=10.0)
        return super().step(closure)


def test_gradients_that_an_optimizer_edits_are_compared_as_it_takes_them():
    model = nn.Linear(8, 4)
    optimizer = EditingSGD(model.parameters(), 1e-3)
    with mpinspect.Inspector(model, second=[0]) as inspector:
        take_step(optimizer, squares(model, torch.randn(16, 8)))
    (error,) = [each.figures["error"] for each in inspector.session().measurements if each.what == "second-gradients"]
    assert 0 < error < 1e-6


def test_weights_that_an_optimizer_has_stepped_are_exact():
    """A clamp gives the weights twins: its bound is no FP32 number. Several updates follow in one recorded step."""
    model, critic = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = [torch.optim.RMSprop(each.parameters(), 1e-2) for each in (model, critic)]
    with mpinspect.Inspector(model, second=[1]) as inspector:
        for _ in range(2):
            for _ in range(8):
                optimizers[1].zero_grad()
                (critic(model(torch.randn(16, 8)).detach()).mean() - critic(torch.randn(16, 4)).mean()).backward()
                optimizers[1].step()
                with torch.no_grad():
                    for weight in critic.parameters():
                        weight.clamp_(-0.05, 0.05)
            optimizers[0].zero_grad()
            critic(model(torch.randn(16, 8))).mean().backward()
            optimizers[0].step()
    errors = [each.figures["error"] for each in inspector.session().measurements if each.what == "second-gradients"]
    assert 0 < max(errors) < 1e-5


def test_an_infinity_that_does_no_harm_is_not_reported():
    """A monitor under no_grad, whose exponential FP32 does not hold."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with mpinspect.Inspector(model, second=[0]) as inspector:
        loss = squares(model, torch.randn(16, 8))
        assert (100 + 100 * loss.detach()).exp().isinf()
        take_step(optimizer, loss)
    assert "fp32-too-coarse" not in {each.id for each in inspector.report().findings}


@pytest.mark.parametrize("write", [lambda x: x.numpy().fill(0.25), lambda x: x.view(torch.int32).fill_(1048576000)])
def test_a_tensor_that_something_else_has_written_is_taken_as_it_is(write):

    def loss(model, x):
        x = x * 0.1
        write(x)
        return squares(model, x)

    assert mpinspect.second_opinion(nn.Linear(8, 4), loss, torch.randn(16, 8)) == ()


@pytest.mark.parametrize(
    "function", [torch.linalg.slogdet, lambda x: (x, torch.linalg.solve(x, torch.ones(2, 1)).sum())]
)
def test_pivots_that_fp64_would_choose_otherwise_raise_no_alarm(function):
    angle = torch.tensor(torch.pi / 4)
    rotation = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    model = nn.Module()
    model.weight = nn.Parameter(rotation)
    found = mpinspect.second_opinion(model, lambda model, x: function(model.weight * x)[1] * 2, torch.tensor(1.1))
    assert found == ()


def test_a_device_without_fp64_is_not_judged_in_fp64(monkeypatch):
    for module in ("recomputation", "in_fp64"):
        monkeypatch.setattr(f"mpinspect.ranges.faults.measure.{module}.computes_in_fp64", lambda device: False)
    _, session = trained([1], torch.bfloat16)
    assert [each.text for each in session.measurements if each.what == "second-gradients"] == ["bfloat16"]
    assert session.notes == ()


def test_the_first_chosen_steps_run_in_fp64_and_those_after_an_infinity():
    choice = StepChoice([1, 4, 9])
    assert [choice.begins(step) > 0 for step in (1, 4, 9)] == [True, True, False]
    assert choice.is_due(12, lambda: ("forward",))
    assert choice.begins(12) > 0
    # All such steps together have a limit.
    choice.took(3600.0)
    assert choice.is_due(13, lambda: ("forward",))
    assert choice.begins(13) == 0


def test_a_model_that_takes_a_step_again_after_a_break_is_judged(tmp_path):
    """The scaler skips the steps, so that the weights stay."""
    model = spreads()
    options = {"lr": 1e-3, "scaler": cpu_scaler(4.0), "optimizers": None, "second": True}
    inspector = inspected(model, lambda _: squares(model, 1e5 + torch.randn(64, 8, 16)), 4, **options)
    found = inspector.report().findings[0]
    assert (found.id, found.severity, found.step, found.layer) == ("fp32-too-coarse", "error", 0, "spread")
    assert {"breaks-in-fp32-too"}.isdisjoint(each.id for each in inspector.report().findings)


@pytest.mark.parametrize(("offset", "is_lost"), [(3e7, True), (1.0, False)])
@pytest.mark.parametrize("foreach", [True, False])
def test_updates_that_fp32_rounds_away_have_their_weight_and_share(offset, is_lost, foreach):
    model = nn.Module()
    model.place, model.other = nn.Parameter(torch.full((64,), offset)), nn.Parameter(torch.ones(4))
    goal = offset + torch.randn(64)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=foreach)
    with mpinspect.Inspector(model, second=[0]) as inspector:
        loss = (model.place - goal).square().sum() + 1e-3 * model.other.sum()
        slope = 2 * (model.place.detach() - goal).double()
        loss.backward()
        optimizer.step()
    found = [each for each in inspector.report().findings if each.id == "updates-lost-in-fp32"]
    assert [each.layer for each in found] == ["place"] * is_lost
    for each in found:
        assert each.evidence["exact"] == pytest.approx(float(0.05 * slope.square().sum()), rel=1e-6)
        moved = model.place.detach().double() - offset
        assert each.evidence["rounded"] == pytest.approx(-float((slope * moved).sum()), rel=1e-6)
        assert each.evidence["rounded"] <= each.evidence["exact"] / 2
