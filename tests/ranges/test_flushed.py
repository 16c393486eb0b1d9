"""Values that flush, or that FP8 cuts off, where no count shows it: gradients that a loop divides, casts, clamps."""

import math

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from trainings import inspected, take_step

from mpinspect import Inspector


def by_id(inspector):
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


SCALE = 2.0**20


def divided(divide, *, inspected=True, size=1e-7):
    """Train FP16 weights with FP32 copies by hand; ``divide`` returns a weight's FP32 gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    copies = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1 / size)
    inspector = Inspector(model, optimizers=optimizer, second=True)
    if inspected:
        inspector.attach()
    for _ in range(6):
        loss = model(torch.randn(16, 8).half()).float().square().mean() * size
        (loss * SCALE).backward()
        for weight, copy in zip(model.parameters(), copies, strict=True):
            copy.grad, weight.grad = divide(weight.grad), None
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(model.parameters(), copies, strict=True):
                weight.copy_(copy)
    if inspected:
        inspector.detach()
    assert not torch._C._len_torch_dispatch_stack()
    return inspector, copies


DIVIDED_IN_HALF = {
    "in place": lambda gradient: gradient.div_(SCALE).float(),
    "out of place": lambda gradient: (gradient * (1 / SCALE)).float(),
    "foreach": lambda gradient: torch._foreach_div([gradient], SCALE)[0].float(),
    "by a tensor": lambda gradient: (gradient / torch.tensor(SCALE)).float(),
}


@pytest.mark.parametrize("how", DIVIDED_IN_HALF)
def test_gradients_divided_in_float16_are_reported(how):
    inspector, _ = divided(DIVIDED_IN_HALF[how])
    found = by_id(inspector)
    lost = found["divided-in-float16"]
    assert (lost.severity, lost.step, lost.evidence["factor"]) == ("error", 1, 1 / SCALE)
    assert lost.evidence["lost"] > 0.5
    assert lost.evidence["line"].startswith("test_flushed.py:")
    assert {each.id for each in found.values() if each.severity != "info"} == {"divided-in-float16"}


@pytest.mark.parametrize(
    ("divide", "size"),
    [
        (lambda gradient: gradient.float() / SCALE, 1e-7),
        # Large enough to survive, or an average that loses next to nothing.
        (lambda gradient: gradient.div_(4).float().div_(SCALE / 4), 1e-7),
        (lambda gradient: gradient.mul_(2).float().div_(2 * SCALE), 1e-7),
    ],
    ids=["in FP32", "by a small number", "multiplied"],
)
def test_gradients_that_survive_a_division_are_not_reported(divide, size):
    inspector, _ = divided(divide, size=size)
    assert "divided-in-float16" not in by_id(inspector)


def test_watching_divisions_changes_no_bit():
    _, watched = divided(DIVIDED_IN_HALF["in place"])
    _, alone = divided(DIVIDED_IN_HALF["in place"], inspected=False)
    assert all(map(torch.equal, watched, alone))


def exchanged(exchange, *, size=1e-8, **sizes):
    """Train FP32 weights with gradients that ``exchange`` returns for those of two batches; ``sizes``: of single outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-15)
    weights = torch.tensor([sizes.get("first", size), size])
    inspector = Inspector(model, optimizers=optimizer, second=True)
    inspector.attach()
    for _ in range(4):
        parts = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(torch.randn(32, 8))
            loss = (output.float().square() * weights).mean()
            parts.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *pair in zip(model.parameters(), *parts, strict=True):
            parameter.grad = exchange(*pair)
        optimizer.step()
    inspector.detach()
    return by_id(inspector)


def into_zeros(one, other):
    total = torch.zeros_like(one)
    for part in (one, other):
        total += (part / 2).half()
    return total


EXCHANGED = {
    "in place": lambda one, other: (one / 2).half().add_((other / 2).half()).float(),
    "out of place": lambda one, other: ((one / 2).half() + (other / 2).half()).float(),
    "stacked": lambda one, other: torch.stack([(one / 4).half(), (other / 4).half()]).float().mean(0) * 4,
    "into zeros": into_zeros,
}


@pytest.mark.parametrize("how", EXCHANGED)
def test_a_cast_that_flushes_the_gradients_of_an_optimizer_is_named(how):
    found = exchanged(EXCHANGED[how])
    flushed = found["gradients-flushed-before-step"]
    assert (flushed.severity, flushed.step, flushed.evidence["operator"]) == ("error", 1, "_to_copy")
    assert flushed.evidence["line"].startswith("test_flushed.py:")
    assert min(flushed.evidence["flushed"], flushed.evidence["taken"]) > 0.8
    assert 0 < flushed.evidence["largest"] <= 2.0**-25
    assert {each.id for each in found.values() if each.severity != "info"} == {"gradients-flushed-before-step"}


@pytest.mark.parametrize(
    "given",
    [
        {"exchange": lambda one, other: ((one * SCALE).half() + (other * SCALE).half()).float() / (2 * SCALE)},
        {"exchange": lambda one, other: (one.bfloat16() + other.bfloat16()).float() / 2},
        {"exchange": EXCHANGED["out of place"], "size": 1e-2},
        # One output's gradients become zero beside those of another one, which are far larger.
        {"exchange": lambda one, other: torch.stack([one, other]).half().float().mean(0), "first": 1.0},
    ],
)
def test_gradients_that_an_exchange_keeps_are_not_reported(given):
    assert "gradients-flushed-before-step" not in exchanged(**given)


def asked(size, *, scale=1.0, dtype=torch.float16, of_weight=True, steps=6):
    """Train with a loss that is weighted by the norm of a gradient from ``torch.autograd.grad`` of an output of this size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(steps):
            x = torch.randn(64, 8, requires_grad=True)
            with torch.autocast("cpu", dtype):
                output = model(x).float()
            (gradient,) = torch.autograd.grad(
                output.mean() * size * scale, model[2].weight if of_weight else x, retain_graph=True
            )
            take_step(optimizer, output.square().mean() * (1 + (gradient / scale).norm().clamp(max=1)), scaler)
    return by_id(inspector)


@pytest.mark.parametrize(
    ("size", "says", "of_weight"),
    [
        (3e-4, "crowd at FP16's lower end", False),
        (1e-9, "whether that made the zeros", False),
        (1e-9, "whether that made the zeros", True),
    ],
)
def test_gradients_of_an_unscaled_output_that_flush_are_reported(size, says, of_weight):
    found = asked(size, of_weight=of_weight)["asked-gradients-flushed"]
    assert (found.severity, found.certainty, found.step) == ("warning", "inferred", 0)
    assert (found.layer, says in found.message) == ("2.weight" * of_weight, True)
    assert found.evidence["line"].startswith("test_flushed.py:")


@pytest.mark.parametrize(
    "given",
    [
        {"size": 1.0},
        {"size": 3e-5, "scale": 2.0**14},
        {"size": 3e-5, "dtype": torch.bfloat16},
        {"size": 1e-9, "steps": 2},
    ],
    ids=["large", "scaled", "BF16", "two steps of zeros"],
)
def test_gradients_that_do_not_flush_are_not_reported(given):
    assert "asked-gradients-flushed" not in asked(**given)


def test_a_missing_scaler_explains_zeros():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(6):
            with torch.autocast("cpu", torch.float16):
                output = model(torch.randn(16, 8))
            gradients = torch.autograd.grad(output.float().square().mean() * 1e-4, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    report = analyse(inspector.session())
    first = report.findings[0]
    assert (first.id, first.severity) == ("scaler-missing-in-float16", "warning")
    assert "crowd just above 2^-25" in first.message
    assert "init_scale=2.0**" in first.code
    assert {each.severity for each in report.findings[1:]} <= {"info"}


def test_a_penalty_before_the_scalers_first_use_leaves_the_scale_known():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(6):
            x, scale = torch.randn(16, 8, requires_grad=True), scaler.get_scale()
            with torch.autocast("cpu", torch.float16):
                output = model(x).float()
            (gradient,) = torch.autograd.grad(output.sum() * scale, x, create_graph=True)
            take_step(optimizer, output.square().mean() + (gradient / scale).square().mean(), scaler)
    session = inspector.session()
    assert session.progress.scale_known
    assert not [finding for finding in analyse(session).findings if finding.severity != "info"]


# -- an optimizer's states ----------------------------------------------------------------------------------------------


class SmallAdam(torch.optim.Optimizer):
    """Adam in FP32 whose two averages are stored in a dtype of their own."""

    def __init__(self, parameters, dtype, eps=1e-8):
        super().__init__(parameters, {"lr": 1e-3, "eps": eps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                first, second = (state.setdefault(name, torch.zeros_like(weight, dtype=self.dtype)) for name in "mv")
                first.copy_(0.9 * first.float() + 0.1 * weight.grad)
                second.copy_(0.999 * second.float() + 0.001 * weight.grad.square())
                weight.sub_(group["lr"] * first.float() / (second.float().sqrt() + group["eps"]))


def of_small_adam(dtype, *, size=0.01, eps=1e-8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = SmallAdam(model.parameters(), dtype, eps)
    return by_id(inspected(model, lambda _: model(torch.randn(16, 8)).square().mean() * size, 6, optimizer=optimizer))


def test_squares_that_an_optimizers_float16_state_flushes_are_reported():
    found = of_small_adam(torch.float16)
    flushed = found["moments-flushed"]
    assert (flushed.severity, flushed.step, "state 'v'" in flushed.message) == ("error", 0, True)
    assert flushed.evidence["flushed"] > 0.5
    assert "weights-exploded" not in {each.id for each in found.values() if each.severity != "info"}


def resumed(change, betas=(0.9, 0.999), late=False):
    """Train an Adam whose states are changed and loaded, in the middle of the run or at the begin of a new one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=betas)

    def take(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)).square().mean() * 1e-3).backward()
            optimizer.step()

    inspector = Inspector(model, optimizers=optimizer)
    if late:
        inspector.attach()
    take(30)
    state = optimizer.state_dict()
    for each in state["state"].values():
        each.update({name: change(each[name]) for name in ("exp_avg", "exp_avg_sq")})
    optimizer.load_state_dict(state)
    if not late:
        inspector.attach()
    take(5)
    inspector.detach()
    return by_id(inspector)


@pytest.mark.parametrize("late", [False, True])
def test_squares_that_a_checkpoint_in_float16_has_lost_are_reported(late):
    found = resumed(lambda state: state.half(), late=late)["moments-flushed"]
    assert (found.severity, found.step, found.certainty) == ("error", 30 * late, "inferred")
    assert "passed through FP16" in found.message


class Widening(torch.optim.Adam):
    """Loads states, which torch casts to the weights' dtype, and makes them FP32 again; its steps change nothing."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for states in self.state.values():
            states.update({name: states[name].float() for name in ("exp_avg", "exp_avg_sq")})

    def step(self):
        pass


@pytest.mark.parametrize("are_half", [False, True])
def test_squares_that_load_state_dict_has_cast_to_float16_are_named_with_its_line(are_half):
    squares = torch.full((4, 8), 1e-10, dtype=torch.float16 if are_half else torch.float32)
    model = nn.Linear(8, 4, bias=False).half()
    optimizer = Widening(model.parameters())
    states = {"step": torch.tensor(9.0), "exp_avg": torch.full_like(squares, 1e-5), "exp_avg_sq": squares}
    with Inspector(model, optimizers=optimizer) as inspector:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: states}})
        for _ in range(2):
            take_step(optimizer, model(torch.randn(16, 8).half()).float().square().mean())
    flushed = by_id(inspector)["moments-flushed"]
    if are_half:
        assert "line" not in flushed.evidence
        assert flushed.fix.startswith("Save and load")
    else:
        assert flushed.evidence["line"].startswith("test_flushed.py:")
        assert "put back the states" in flushed.fix
        assert 'for name in ("exp_avg", "exp_avg_sq"):' in flushed.code


@pytest.mark.parametrize("change", [torch.Tensor.clone, torch.Tensor.bfloat16, torch.zeros_like])
def test_states_that_a_checkpoint_holds_are_not_a_fault(change):
    assert "moments-flushed" not in resumed(change)


def test_flushed_squares_are_a_warning_while_the_weights_stay():
    assert of_small_adam(torch.float16, eps=1.0)["moments-flushed"].severity == "warning"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 0.01), (torch.bfloat16, 0.01), (torch.float16, 1e4)])
def test_states_that_hold_their_squares_are_not_a_fault(dtype, size):
    assert "moments-flushed" not in of_small_adam(dtype, size=size)


class Cast(torch.autograd.Function):
    """A cast to FP8 of the gradient alone, with or without a scale."""

    @staticmethod
    def forward(ctx, x, dtype, is_scaled):
        ctx.dtype, ctx.is_scaled = dtype, is_scaled
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        scale = 256 / gradient.abs().amax() if ctx.is_scaled else 1.0
        return (gradient * scale).to(ctx.dtype).float() / scale, None, None


class CastHead(nn.Module):
    def __init__(self, dtype, is_scaled):
        super().__init__()
        self.layer, self.dtype, self.is_scaled = nn.Linear(8, 4), dtype, is_scaled

    def forward(self, x):
        return Cast.apply(self.layer(x), self.dtype, self.is_scaled)


def cast(dtype=torch.float8_e4m3fn, *, is_scaled=False, size=1e-5, spread=0.0, head=CastHead):
    """Train a model whose last gradients, about ``size``, are cast; ``spread``: the size of one row's, the rest is smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), head(dtype, is_scaled))
    weights = torch.full((16, 1), size)
    weights[0] += spread
    return by_id(inspected(model, lambda _: (model(torch.randn(16, 8)).sin() * weights).sum(), 12, second=True))


@pytest.mark.parametrize(
    ("dtype", "size", "named"), [(torch.float8_e4m3fn, 1e-5, "FP8 E4M3"), (torch.float8_e5m2, 1e-7, "FP8 E5M2")]
)
def test_a_cast_to_fp8_that_leaves_zeros_is_named_with_its_line(dtype, size, named):
    found = cast(dtype, size=size)["operator-flushes"]
    # No weight gets a gradient.
    assert (found.severity, found.step, found.certainty) == ("error", 1, "measured")
    assert "the gradients of the weights are off by 100% of their size" in found.message
    assert found.evidence["line"].startswith("test_flushed.py:")
    assert f"in the backward of Cast ({found.evidence['line']}), a cast to {named} flushes 100% of 64 " in found.message
    assert str(dtype) in found.code


@pytest.mark.parametrize(("size", "is_found"), [(1e-7, True), (1e-4, True), (10.0, False)])
def test_a_cast_to_fp8_that_loses_small_values_below_an_unused_range_is_named(size, is_found):
    """Rows of gradients from ``size`` down to a 128th of it: a larger scale keeps them all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), CastHead(torch.float8_e5m2, False))
    weights = size * torch.logspace(0, -7, 64, base=2)[:, None]
    found = by_id(inspected(model, lambda _: (model(torch.randn(64, 8)).sin() * weights).sum(), 6, second=True))
    flushed = found.get("operator-flushes")
    assert (flushed is not None) is is_found
    if size == 1e-4:
        assert 0.05 < flushed.evidence["lost"] < 0.5
        assert flushed.evidence["flushed"] < 0.9
        assert flushed.evidence["unused"] == pytest.approx(math.log2(57344 / size), abs=2)
        assert "a scale that uses them keeps the small ones" in flushed.message


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_cast_to_fp8_of_rows_that_vanish_beside_an_infinity_is_judged(broken):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    x = 1e-7 * torch.randn(16, 8)
    x[0, 0] = broken

    def loss_of(_):
        return (model(x.to(torch.float8_e5m2).float()).nan_to_num().clamp(-1, 1)).square().mean()

    inspector = inspected(model, loss_of, 4, second=[1])
    assert "operator-flushes" in by_id(inspector)
    assert inspector.session().notes == ()


def test_the_gradient_of_a_cast_in_the_forward_is_cast_to_fp8_too():
    class Rounded(CastHead):
        def forward(self, x):
            return self.layer(x).to(self.dtype).float()

    found = cast(head=Rounded)["operator-flushes"]
    assert "in the backward of " in found.message
    # The line of the forward whose gradient it is.
    assert f"in the backward of '2' (Rounded, {found.evidence['line']}), a cast to FP8" in found.message
    assert found.evidence["line"].startswith("test_flushed.py:")


@pytest.mark.parametrize(
    "given",
    [
        {"is_scaled": True},
        {"size": 0.1},
        # One row has most of the sum: the scale is right, and the others are negligible.
        {"is_scaled": True, "size": 1e-9, "spread": 1.0},
    ],
    ids=["scaled", "large", "one large row"],
)
def test_a_cast_to_fp8_that_leaves_the_large_values_is_not_reported(given):
    assert "operator-flushes" not in cast(**given)


class CastInput(nn.Linear):
    """Casts its input to FP8 in the forward alone, with one scale or with one for each row."""

    def __init__(self, by_row):
        super().__init__(8, 4)
        self.by_row = by_row

    def forward(self, x):
        largest = x.abs().amax(-1, keepdim=True) if self.by_row else x.abs().amax()
        scale = 448 / largest.clamp(min=1e-30)
        with torch.no_grad():
            cast = (x * scale).to(torch.float8_e4m3fn).float() / scale
        return super().forward(x + (cast - x).detach())


@pytest.mark.parametrize(
    ("by_row", "small", "gain", "is_named"),
    [
        (False, 12, 1e7, True),
        (True, 12, 1e7, False),
        # E4M3 holds numbers 2^18 times smaller than the largest.
        (False, 12, 1e3, False),
        # One row of 16 vanishes; rows of zeros do not count.
        (False, 1, 1e7, False),
    ],
)
def test_rows_that_vanish_in_a_cast_to_fp8_with_one_scale_are_named(by_row, small, gain, is_named):
    model = nn.Sequential(CastInput(by_row), nn.Linear(4, 2))

    def loss_of(_):
        x = gain * torch.randn(16, 8)
        x[:small] /= gain
        return model(x / gain).square().sum()

    found = by_id(inspected(model, loss_of, 4, second=True))
    assert ("operator-flushes" in found) is is_named
    if is_named:
        assert found["operator-flushes"].evidence["rows"] == small / 16
        assert "amax(-1, keepdim=True)" in found["operator-flushes"].code


@pytest.mark.parametrize(("size", "is_named"), [(1e-5, True), (1e-2, False)])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_norm_that_the_loop_reads_as_zero_is_named(size, is_named, is_read):
    model = nn.Linear(8, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact, read = [], []
    with Inspector(model, optimizers=optimizer, second=True, loss_scale=1) as inspector:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(4, 8).half()).float() * size).sum().backward()
            norm = model.weight.grad.pow(2).sum().sqrt()
            exact.append(float(model.weight.grad.double().norm()))
            read.append(float(norm) if is_read else 0.0)
            optimizer.step()
    found = by_id(inspector)
    assert ("operator-flushes" in found) is (is_named and is_read)
    if is_named and is_read:
        assert read == [0.0, 0.0, 0.0]
        assert found["operator-flushes"].evidence["exact"] == pytest.approx(exact[1], rel=1e-2)
        assert "torch.linalg.vector_norm" in found["operator-flushes"].code


def averaged(average, steps=12, skips_from=4, compares=True):
    """Train with a running number that ``average`` computes from itself and a gradient's norm, infinite in one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.ones(())
    with Inspector(model, optimizers=optimizer, second=range(2, steps)) as inspector:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            norm = model.weight.grad.norm() * (torch.inf if step == skips_from else 1.0)
            mean = average(mean, norm)
            if compares and norm > 10 * mean:
                model.weight.grad.mul_(0.1)
            optimizer.step()
    return by_id(inspector)


def in_place(mean, norm):
    return mean.mul_(0.9).add_(0.1 * norm)


def only_finite(mean, norm):
    return 0.9 * mean + 0.1 * norm if torch.isfinite(norm) else mean


@pytest.mark.parametrize(
    ("average", "given", "is_named"),
    [
        (lambda mean, norm: 0.9 * mean + 0.1 * norm, {}, True),
        (in_place, {}, True),
        (only_finite, {}, False),
        # It ends with the next finite number.
        (torch.minimum, {"skips_from": 0}, False),
        # It is set to infinity on purpose, as at the start of an epoch.
        (lambda mean, norm: mean.fill_(torch.inf), {}, False),
        # It is made anew from a number of the script.
        (lambda mean, norm: torch.tensor(torch.inf) + 0 * norm, {}, False),
        # It is only printed, or becomes infinite in the step itself.
        (lambda mean, norm: 0.9 * mean + 0.1 * norm, {"compares": False}, False),
        (lambda mean, norm: 0.9 * mean + 0.1 * norm, {"skips_from": 11}, False),
    ],
    ids=["new", "in place", "only finite", "minimum", "filled", "made anew", "not compared", "last step"],
)
def test_a_kept_number_that_stays_infinite_is_named(average, given, is_named):
    found = averaged(average, **given)
    assert ("kept-number-not-finite" in found) is is_named
    if is_named:
        assert (found["kept-number-not-finite"].step, found["kept-number-not-finite"].severity) == (5, "warning")


def test_a_bias_of_one_element_with_an_infinite_gradient_is_no_kept_number():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, second=range(2, 8)) as inspector:
        for step in range(8):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).sum() * (torch.inf if step == 5 else 1.0)).backward()
            size = model.bias.grad.abs()
            if size > 1e6:
                optimizer.zero_grad()
            optimizer.step()
    assert float(size) < 1e6
    assert "kept-number-not-finite" not in by_id(inspector)


def test_a_run_with_casts_to_fp8_does_not_compute_in_fp32_alone():
    model = nn.Sequential(nn.Linear(8, 8), CastHead(torch.float8_e5m2, True))
    inspector = inspected(model, lambda _: model(torch.randn(16, 8)).square().mean(), 4, second=True)
    assert "\nComputes in FP32 with casts to FP8: " in str(inspector.report())


class Clamped(nn.Module):
    """Clamps its input, times a scale, to FP8's range, and casts it."""

    def __init__(self, scale, dtype):
        super().__init__()
        self.layer, self.scale, self.dtype = nn.Linear(8, 8), scale, dtype

    def forward(self, x):
        end = torch.finfo(self.dtype).max
        # Half of the magnitudes are 1, half are 3.
        x = torch.where(torch.arange(8) % 2 == 0, 1.0, 3.0) * x.sign()
        scaled = (x * (end * self.scale)).clamp(-end, end)
        return self.layer(scaled.to(self.dtype).float() / (end * self.scale))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)])
def test_a_clamp_before_a_cast_to_fp8_that_cuts_off_values_is_named_with_their_share(dtype, bound):
    model = Clamped(1.0, dtype)
    found = by_id(inspected(model, lambda _: model(torch.randn(16, 8)).square().mean(), 12, second=True))
    figures = found["cast-saturates"].evidence
    assert (found["cast-saturates"].severity, found["cast-saturates"].certainty) == ("warning", "measured")
    assert (figures["bound"], figures["largest"], figures["saturated"]) == (bound, 3 * bound, 0.5)
    assert figures["lost"] == pytest.approx(2 / 4)


@pytest.mark.parametrize(("size", "severity"), [(1e2, None), (1e3, "warning"), (1e5, "error")])
def test_a_cast_to_fp8_that_saturates_is_named_and_the_gradients_error_makes_it_an_error(size, severity):
    cast = torch.tensor(1e3).to(torch.float8_e4m3fn)
    if not bool(cast.float().isfinite()):
        pytest.skip("this torch casts what is beyond FP8's range to NaN")
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))

    def loss_of(_):
        hidden = model[0](size * torch.randn(16, 8))
        rounded = hidden + (hidden.to(torch.float8_e4m3fn).float() - hidden).detach()
        return (model[1](rounded) / size).square().mean()

    found = by_id(inspected(model, loss_of, 4, second=True))
    named = found.get("cast-saturates")
    assert (named and named.severity) == severity
    if named is not None:
        assert severity != "error" or "the gradients of the weights are off by" in named.message
        assert "gradients-inaccurate" not in found


@pytest.mark.parametrize(
    "bounds",
    [{"max": 448.0}, {"min": -448.0}, {"min": torch.tensor(-448.0), "max": torch.tensor(448.0)}, {"min": -2, "max": 2}],
)
def test_other_clamps_are_neither_named_nor_left_out(bounds):
    model = nn.Linear(8, 8)
    inspector = inspected(
        model, lambda _: (1e4 * model(torch.randn(16, 8))).clamp(**bounds).square().mean(), 4, second=True
    )
    assert inspector.session().notes == ()
    assert "cast-saturates" not in by_id(inspector)


@pytest.mark.parametrize("scale", [1 / 3, 0.34])
def test_a_clamp_to_fp8s_range_that_cuts_off_little_is_not_reported(scale):
    model = Clamped(scale, torch.float8_e4m3fn)
    found = by_id(inspected(model, lambda _: model(torch.randn(16, 8)).square().mean(), 12, second=True))
    assert "cast-saturates" not in found
