"""An optimizer's own arithmetic in 16 bits, and FP16 results that a loop keeps, in a step that is computed twice."""

import pytest
import torch
from torch import nn
from trainings import take_step

import mpinspect

BF16, FP16 = torch.bfloat16, torch.float16
#: The findings that the second computation of an optimizer's step can make.
OURS = {"overflow-in-operator", "buffer-stops-changing", "sum-loses-terms", "operator-flushes", "constant-is-one"}


class Stepping(torch.optim.Optimizer):
    """Adds a negative multiple of each gradient, and calls ``compute(weight, gradient, state)`` for a factor before."""

    def __init__(self, parameters, compute):
        super().__init__(parameters, {"lr": 2.0**-10})
        self.compute = compute

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for weight in group["params"]:
                factor = self.compute(weight, weight.grad, self.state[weight])
                weight -= group["lr"] * weight.grad * factor


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def trained(make, dtype=torch.float32, steps=3, after=None, second=(1,)):
    """Train a network of one dtype with ``make(parameters)``; return its inspector and its weights."""
    model = network(dtype)
    optimizer = make(list(model.parameters()))
    x = torch.randn(64, 16)
    inspector = mpinspect.Inspector(model, second=list(second))
    with inspector:
        for _ in range(steps):
            with torch.autocast("cpu", BF16, enabled=dtype is torch.float32):
                output = model(x.to(dtype))
            take_step(optimizer, (output.float() - x[:, :4]).square().mean())
            if after is not None:
                after(model)
    assert inspector.session().notes == ()
    return inspector, [each.detach().clone() for each in model.parameters()]


def found(inspector):
    return {each.id: each for each in inspector.report().findings if each.id in OURS and each.severity != "info"}


def stepping(compute):
    return lambda parameters: Stepping(parameters, compute)


def norm_overflows(weight, gradient, state):
    return 1 / ((weight.detach() * 2000).half().pow(2).sum().sqrt() + 1)


def state_stops(weight, gradient, state):
    square = state.setdefault("second", torch.ones_like(weight, dtype=BF16))
    square.mul_(0.999).add_(gradient.to(BF16).square(), alpha=0.001)
    return 1 / square.float().sqrt()


def state_stops_in_a_new_tensor(weight, gradient, state):
    old = state.setdefault("second", torch.ones_like(weight, dtype=BF16))
    state["second"] = 0.999 * old + 0.001 * gradient.to(BF16).square()
    return 1 / old.float().sqrt()


def square_flushes(weight, gradient, state):
    half = (gradient * 2.0**-14).half()
    return (half * half).float().add(1).sqrt()


def addend_flushes(weight, gradient, state):
    return 1 + (torch.zeros_like(weight, dtype=FP16) + 1e-8).float()


def constant_is_one(weight, gradient, state):
    beta = state.setdefault("beta", torch.tensor(0.999, dtype=BF16))
    return 1 + (1 - beta**2).float()


@pytest.mark.parametrize(
    ("compute", "id", "words"),
    [
        (norm_overflows, "overflow-in-operator", "overflows FP16"),
        (state_stops, "buffer-stops-changing", "the state 'second'"),
        (state_stops_in_a_new_tensor, "buffer-stops-changing", "the state 'second'"),
        (square_flushes, "operator-flushes", "mul flushes 100% of"),
        (addend_flushes, "operator-flushes", "add flushes 100% of"),
        (constant_is_one, "constant-is-one", "the difference of 1 and a number in BF16 is 0"),
    ],
)
def test_a_fault_of_the_step_is_named_with_optimizer_and_line(compute, id, words):
    findings = found(trained(stepping(compute))[0])
    assert set(findings) == {id}
    finding = findings[id]
    lines = range(compute.__code__.co_firstlineno, compute.__code__.co_firstlineno + 6)
    assert any(
        f"In step 1, in Stepping's step (test_optimizer_arithmetic.py:{line}), " in finding.message for line in lines
    )
    assert words in finding.message
    assert finding.severity == "warning"
    assert finding.step == 1
    assert finding.fix
    assert finding.code


def in_float32(weight, gradient, state):
    square = state.setdefault("second", torch.ones_like(weight, dtype=torch.float32))
    beta = state.setdefault("beta", torch.tensor(0.999))
    square.mul_(0.999).add_(gradient.float().square() * 2.0**-40, alpha=0.001)
    return 1 / (square * (1 - beta)).sqrt() / ((weight.float() * 2000).pow(2).sum().sqrt() + 1)


def masked_ratio(weight, gradient, state):
    zero = (gradient.bfloat16() * 0).norm()
    return torch.where(zero > 0, weight.detach().bfloat16().norm() / zero, torch.ones_like(zero))


def fast_average(weight, gradient, state):
    mean = state.setdefault("mean", torch.zeros_like(weight, dtype=BF16))
    mean.mul_(0.9).add_(gradient.to(BF16), alpha=0.1)
    return 1 - torch.tensor(0.5, dtype=BF16)


def squares_decay(weight, gradient, state):
    """Each step takes a twentieth off, by which terms that rounding loses stay a small part."""
    square = state.setdefault("second", torch.ones_like(weight, dtype=BF16))
    square.mul_(0.95).addcmul_(gradient.to(BF16), gradient.to(BF16), value=0.05)
    return 1 / square.float().sqrt()


def compensated(weight, gradient, state):
    """Move the weight by a sum of updates and rounding errors (Kahan), which a difference makes."""
    error = state.setdefault("error", torch.zeros_like(weight))
    error.sub_(gradient, alpha=2.0**-10)
    old = weight.clone()
    weight.add_(error)
    error.add_(old.sub_(weight))
    return 0


def chosen_by_sign(weight, gradient, state):
    mean = state.setdefault("mean", torch.zeros_like(weight, dtype=BF16))
    mask = (mean * gradient.to(BF16)) > 0
    mean.lerp_(gradient.to(BF16), 0.1)
    return mask.float()


@pytest.mark.parametrize(
    ("dtype", "factor", "lost"),
    [(BF16, 1 - 2.0**-10, True), (BF16, 1 - 2.0**-7, False), (torch.float32, 1 - 2.0**-10, False)],
)
def test_a_decay_that_rounds_back_is_measured_in_an_optimizer_of_any_name(dtype, factor, lost):
    def decays(weight, gradient, state):
        weight.mul_(factor)
        return 1

    inspector, weights = trained(stepping(decays), dtype, steps=80)
    findings = [each for each in inspector.report().findings if each.id == "weight-decay-lost"]
    assert len(findings) == lost
    for finding in findings:
        assert finding.evidence["factor"] == pytest.approx(factor, rel=1e-4)
        assert finding.evidence["lost"] == finding.evidence["elements"] == sum(each.numel() for each in weights)
        assert finding.severity == "warning"


@pytest.mark.parametrize(
    "compute", [in_float32, masked_ratio, fast_average, squares_decay, compensated, chosen_by_sign]
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_sound_step_has_no_finding(compute, dtype):
    assert found(trained(stepping(compute), dtype)[0]) == {}


@pytest.mark.parametrize("compute", [norm_overflows, state_stops, square_flushes, constant_is_one, compensated])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_weights_are_bit_identical(compute, dtype):
    _, seen = trained(stepping(compute), dtype, second=(0, 1, 2))
    _, plain = trained(stepping(compute), dtype, second=())
    assert all(map(torch.equal, seen, plain))


class OwnAdam(torch.optim.Adam): ...


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnAdam])
def test_a_moment_that_cannot_decay_has_one_finding(kind, foreach):
    inspector, _ = trained(lambda parameters: kind(parameters, foreach=foreach), BF16)
    of_moments = [each.id for each in inspector.report().findings if "exp_avg_sq" in each.message]
    assert of_moments == ["moments-cannot-decay"]


@pytest.mark.parametrize("foreach", [False, True])
def test_operators_in_float32_are_not_computed_twice(foreach, monkeypatch):
    from mpinspect.ranges.faults.measure.optimizer_arithmetic import OptimizerArithmetic

    calls = []
    monkeypatch.setattr(OptimizerArithmetic, "_ran", lambda self, *args: calls.append(args))
    trained(lambda parameters: torch.optim.AdamW(parameters, foreach=foreach))
    assert calls == []


def test_the_closure_belongs_to_the_loop():
    """A square of the closure's own, which would be flushed in the step, is not an operator of the optimizer."""
    flushed = []

    class Closing(Stepping):
        def step(self, closure=None):
            return super().step(lambda: flushed.append(torch.full((64,), 2.0**-14).half().square()))

    assert found(trained(lambda parameters: Closing(parameters, fast_average))[0]) == {}
    assert len(flushed) == 3
    assert not flushed[0].any()


def test_an_overflow_after_which_the_forward_breaks_is_an_error():
    def infinite(weight, gradient, state):
        state["step"] = state.get("step", 0) + 1
        return 1 if state["step"] < 2 else (weight.detach() * 1e6).half().abs().max().float()

    finding = found(trained(stepping(infinite))[0])["overflow-in-operator"]
    assert (finding.severity, finding.step) == ("error", 1)


class Kept:
    """Adds, after each step, ``values(gradient)`` to tensors that the loop keeps."""

    def __init__(self, values, dtype=FP16):
        self.values, self.dtype = values, dtype
        self.sums = {}

    @torch.no_grad()
    def __call__(self, model):
        for name, weight in model.named_parameters():
            total = self.sums.setdefault(name, torch.zeros_like(weight, dtype=self.dtype))
            total += self.values(weight.grad)


def of_squares_in_fp8(size, is_scaled):
    """Return a function that keeps a mean of the gradients' squares, times ``size``, in FP8."""

    def compute(weight, gradient, state):
        squares = size * gradient.square()
        scale = 448 / squares.amax() if is_scaled else torch.tensor(1.0)
        state["squares"], state["scale"] = (squares * scale).to(torch.float8_e4m3fn), scale
        return ((state["squares"].float() / state["scale"]).mean() / size).sqrt()

    return compute


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize(("size", "id"), [(1e-9, "operator-flushes"), (1e9, "cast-saturates")])
def test_states_that_a_cast_to_fp8_spoils_are_named_with_the_optimizers_line(size, id, is_scaled):
    inspector, _ = trained(stepping(of_squares_in_fp8(size, is_scaled)))
    named = [each for each in inspector.report().findings if each.id in ("operator-flushes", "cast-saturates")]
    assert [each.id for each in named] == [id] * (not is_scaled)
    if named:
        assert "in Stepping's step (test_optimizer_arithmetic.py:" in named[0].message
        assert named[0].severity == "warning"


@pytest.mark.parametrize("dtype", [FP16, torch.float32])
def test_flushed_results_that_the_loop_keeps_are_named(dtype):
    kept = Kept(lambda gradient: (gradient * 2.0**-14).half().square().to(dtype), dtype)
    findings = found(trained(lambda parameters: torch.optim.SGD(parameters, 0.1), second=(2,), after=kept)[0])
    assert set(findings) == {"operator-flushes"}
    assert "A tensor that persists from step to step takes them." in findings["operator-flushes"].message


def test_flushed_results_that_are_freed_are_not_named():
    def after(model):
        for weight in model.parameters():
            (weight.grad * 2.0**-14).half().square().float().sum()

    assert found(trained(lambda parameters: torch.optim.SGD(parameters, 0.1), second=(2,), after=after)[0]) == {}


def test_results_above_the_flush_edge_are_not_named():
    kept = Kept(lambda gradient: (gradient * 2.0**10).half())
    assert found(trained(lambda parameters: torch.optim.SGD(parameters, 0.1), second=(2,), after=kept)[0]) == {}


@pytest.mark.parametrize(("rate", "dtype", "kept"), [(1e-6, BF16, 0.0), (0.1, BF16, 1.0), (1e-6, torch.float32, None)])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("foreach", [False, True])
def test_the_decrease_of_the_loss_by_rounded_updates_is_measured(rate, dtype, kept, make, foreach):
    inspector, _ = trained(lambda parameters: make(parameters, lr=rate, foreach=foreach, weight_decay=0.0), dtype)
    effects = [each for each in inspector.session().measurements if each.what == "second-updates"]
    assert [each.step for each in effects] == [1] * (kept is not None)
    for each in effects:
        assert each.figures["exact"] > 0
        assert each.figures["rounded"] / each.figures["exact"] == pytest.approx(kept, abs=0.1)
