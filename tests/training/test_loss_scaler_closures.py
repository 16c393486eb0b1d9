"""Steps with closures under a loss scaler: weights equal those without one, and an overflow restores the previous state."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import equal
from torch import nn
from trainings import closure_of

from mpinspect import Inspector
from mpinspect.training.loss_scaler import LossScaler, LossScaleWarning

Closure = Callable[[], torch.Tensor]

X = torch.tensor([[1.0, 0.5], [-0.5, 2.0], [0.25, -1.0]])
Y = torch.tensor([[1.0], [0.0], [2.0]])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def lbfgs(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=3, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "fused sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "lbfgs": lbfgs(),
    "lbfgs with line search": lbfgs(line_search_fn="strong_wolfe"),
}


class Run:
    """A network, its optimizer, and a closure; evaluations whose number is in ``poisoned`` overflow in the backward."""

    def __init__(self, kind: str, scaler: torch.amp.GradScaler | None) -> None:
        self.model = network()
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.scaler = scaler
        self.evaluations = 0
        self.poisoned: set[int] = set()

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(X) - Y).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.evaluations in self.poisoned:
            next(self.model.parameters()).grad[0, 0] = math.inf
        self.evaluations += 1
        return loss

    def step(self, by_keyword: bool = False) -> Any:
        if self.scaler is None:
            return self.optimizer.step(self.closure)
        arguments = {"closure": self.closure} if by_keyword else {}
        result = self.scaler.step(self.optimizer, *(() if by_keyword else (self.closure,)), **arguments)
        self.scaler.update()
        return result

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def test_grad_scaler_steps_on_scaled_gradients_and_loss_scaler_does_not() -> None:
    """The gradient is 1 and the learning rate 1. GradScaler unscales first and runs the closure after: 1 - 1024."""
    results = []
    for scaler in (torch.amp.GradScaler("cpu", 1024.0), LossScaler("cpu", 1024.0)):
        weight = torch.ones((), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        closure = closure_of(optimizer, lambda weight=weight: weight * 1.0, scaler)
        closure()
        scaler.step(optimizer, closure)
        scaler.update()
        results.append(weight.item())
    assert results == [-1023.0, 0.0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_weights_as_without_a_scaler(kind: str) -> None:
    """A power of two changes no bit of an FP32 gradient."""
    plain = Run(kind, None)
    losses = [plain.step().item() for _ in range(6)]
    for scale, by_keyword in ((2.0**-6, False), (2.0**10, True), (2.0**16, False)):
        scaler = LossScaler("cpu", scale)
        run = Run(kind, scaler)
        assert [run.step(by_keyword).item() for _ in range(6)] == losses
        assert all(map(torch.equal, run.weights, plain.weights))
        assert run.evaluations == plain.evaluations
        assert (scaler.steps, scaler.skipped_steps, scaler._get_growth_tracker()) == (6, 0, 6)
    assert equal(run.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["in the first step", "in the third"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_overflow_in_the_first_evaluation(kind: str, first: bool, by_keyword: bool) -> None:
    scaler = LossScaler("cpu", 1024.0)
    run = Run(kind, scaler)
    for _ in range(0 if first else 2):
        run.step(by_keyword)
    weights, state = run.weights, copy.deepcopy(run.optimizer.state_dict())
    run.poisoned, begun = {run.evaluations}, run.evaluations
    loss = run.step(by_keyword)
    assert scaler.last_step_skipped
    assert loss.item() == ((run.model(X) - Y).square().mean()).item()
    assert run.evaluations == begun + 1
    assert all(map(torch.equal, run.weights, weights))
    assert equal(run.optimizer.state_dict(), state)
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.skips[0].phase) == (512.0, 1, "backward")
    run.step(by_keyword)
    assert not scaler.last_step_skipped
    assert not all(map(torch.equal, run.weights, weights))


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs with line search"])
@pytest.mark.parametrize("begun", [0, 1, 2])
def test_an_overflow_in_a_later_evaluation(kind: str, begun: int) -> None:
    """L-BFGS has already moved the weights. Afterwards it continues as if the step had not started."""
    runs = [Run(kind, LossScaler("cpu", 1024.0)) for _ in range(2)]
    for run in runs:
        for _ in range(begun):
            run.step()
    run, untouched = runs
    weights, state = run.weights, copy.deepcopy(run.optimizer.state_dict())
    identities = [id(parameter) for parameter in run.model.parameters()]
    run.poisoned = {run.evaluations + 2}
    run.step()
    assert run.scaler.last_step_skipped
    assert [id(parameter) for parameter in run.model.parameters()] == identities
    assert all(map(torch.equal, run.weights, weights))
    assert equal(run.optimizer.state_dict(), state)
    assert run.scaler.get_scale() == 512.0
    for _ in range(4):
        run.step()
        untouched.step()
    assert all(map(torch.equal, run.weights, untouched.weights))
    assert equal(run.optimizer.state_dict(), untouched.optimizer.state_dict())
    assert (run.scaler.steps, run.scaler.skipped_steps) == (begun + 5, 1)


def test_a_failing_forward_is_distinguished_from_a_failing_backward() -> None:
    scaler = LossScaler("cpu", 1024.0, forward_nonfinite="hold")
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=4)
    values = iter([1.0, math.nan])
    scaler.step(optimizer, closure_of(optimizer, lambda: weight.square() * next(values), scaler))
    with pytest.warns(LossScaleWarning, match="not finite before it was scaled"):
        scaler.update()
    assert (weight.item(), scaler.get_scale(), scaler.skips[0].phase) == (1.0, 1024.0, "forward")


def test_clipping_inside_the_closure() -> None:
    """unscale_() in the closure, then clipping: the gradients are not unscaled a second time."""
    weights = []
    for scaler in (None, LossScaler("cpu", 1024.0)):
        model = network()
        optimizer = lbfgs()(model)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, scaler: Any = scaler) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(X) - Y).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        for _ in range(3):
            if scaler is None:
                optimizer.step(closure)
            else:
                scaler.step(optimizer, closure)
                scaler.update()
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


class SharpnessAware(torch.optim.Optimizer):
    """Moves uphill along the present gradients, evaluates the gradients there, and applies them to the original weights."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure) -> torch.Tensor:
        (weight,) = self.param_groups[0]["params"]
        before, self.state[weight]["uphill"] = weight.clone(), weight.grad * 0.5
        # Writes through .data do not change the version counter.
        weight.data.add_(self.state[weight]["uphill"])
        with torch.enable_grad():
            loss = closure()
        weight.copy_(before - self.param_groups[0]["lr"] * weight.grad)
        return loss


@pytest.mark.parametrize("poisoned", [None, 0, 1])
def test_an_optimizer_that_moves_before_it_asks(poisoned: int | None) -> None:
    """loss = w^2 at w = 1: uphill by 0.5 * 2 to w = 2, whose gradient is 4; 1 - 0.125 * 4 = 0.5."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = SharpnessAware([weight], lr=0.125)
    scaler = LossScaler("cpu", 64.0)
    seen: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        scaler.scale(loss).backward()
        if poisoned == len(seen):
            weight.grad.fill_(math.nan)
        seen.append(weight.item())
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert seen == ([1.0] if poisoned == 0 else [1.0, 2.0])
    assert scaler.last_step_skipped is (poisoned is not None)
    assert weight.item() == (0.5 if poisoned is None else 1.0)
    assert (not optimizer.state) is (poisoned is not None)


def test_options_that_an_optimizer_changes_are_restored() -> None:
    """Some optimizers store their progress in param_groups, some have a tensor as learning rate."""

    class Restless(torch.optim.Optimizer):
        def step(self, closure: Closure) -> torch.Tensor:
            (group,) = self.param_groups
            closure()
            group["lr"].mul_(2)
            group["progress"] = (group["progress"][0] + 1, [5])
            return closure()

    weight = torch.ones((), requires_grad=True)
    optimizer = Restless([weight], {"lr": torch.tensor(1.0), "progress": (0, [])})
    scaler = LossScaler("cpu", 2.0)
    rate = optimizer.param_groups[0]["lr"]
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        scaler.scale(weight * 1.0).backward()
        evaluations.append(weight.grad.fill_(math.inf if len(evaluations) == 1 else 1.0))
        return weight

    scaler.step(optimizer, closure)
    assert scaler.last_step_skipped
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate.item(), optimizer.param_groups[0]["progress"]) == (1.0, (0, []))


# -- refused closures -------------------------------------------------------------------------------------------------


def refused(change: str) -> tuple[LossScaler, Run, Closure]:
    """Return a run of L-BFGS after one step, and a closure that is faulty from its second evaluation on."""
    scaler = LossScaler("cpu", 1024.0)
    run = Run("lbfgs", scaler)
    run.step()
    good, evaluations = run.closure, [0]

    def closure() -> torch.Tensor:
        evaluations[0] += 1
        if evaluations[0] < 2:
            return good()
        run.optimizer.zero_grad()
        loss = (run.model(X) - Y).square().mean()
        if change == "no scale":
            loss.backward()
        elif change == "no backward":
            scaler.scale(loss)
        elif change == "update":
            scaler.scale(loss).backward()
            scaler.unscale_(run.optimizer)
            scaler.update()
        else:
            raise KeyError("the closure's own fault")
        return loss

    return scaler, run, closure


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            "no scale",
            RuntimeError,
            r"the closure did not scale its loss: .* Write scaler.scale\(loss\).backward\(\) in it",
        ),
        ("no backward", RuntimeError, "no parameter of this optimizer has a gradient"),
        ("update", RuntimeError, r"the closure called update\(\): call it after step"),
        ("raise", KeyError, "the closure's own fault"),
    ],
)
def test_an_error_in_a_closure_restores_the_state(change: str, error: type[Exception], words: str) -> None:
    scaler, run, closure = refused(change)
    weights, state = run.weights, copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(error, match=words):
        scaler.step(run.optimizer, closure)
    assert all(map(torch.equal, run.weights, weights))
    assert equal(run.optimizer.state_dict(), state)
    assert scaler.get_scale() == 1024.0
    run.step()
    assert not scaler.last_step_skipped
    assert not all(map(torch.equal, run.weights, weights))


def test_invalid_closures_are_refused() -> None:
    scaler = LossScaler("cpu", 8.0)
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight * 1.0).backward()
    with pytest.raises(TypeError, match="the closure must be a function that returns the loss, not 3"):
        scaler.step(optimizer, closure=3)
    scaler.step(optimizer, closure=None)
    assert weight.item() == 0.0
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer, lambda: weight)


def test_fp16_weights_in_a_closure() -> None:
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for allow in (False, True):
        scaler = LossScaler("cpu", 8.0, allow_fp16_gradients=allow)
        closure = closure_of(optimizer, lambda: weight.float().sum(), scaler)
        if not allow:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler.step(optimizer, closure)
            assert weight.tolist() == [1.0, 1.0]
            continue
        scaler.step(optimizer, closure)
        assert weight.tolist() == [0.0, 0.0]


# -- under the inspector ----------------------------------------------------------------------------------------------


def inspected(kind: str, poisoned: set[int], steps: int = 4) -> tuple[Run, Any]:
    scaler = LossScaler("cpu", 1024.0)
    run = Run(kind, scaler)
    run.poisoned = poisoned
    with Inspector(run.model, optimizers=run.optimizer, scalers=scaler) as inspector:
        for _ in range(steps):
            run.step()
    return run, inspector.session()


@pytest.mark.parametrize("kind", ["sgd", "fused adam", "lbfgs"])
def test_the_inspector_counts_a_skipped_closure_step_as_skipped(kind: str) -> None:
    run, session = inspected(kind, {0})
    assert (session.progress.steps, session.progress.skipped_steps) == (4, 1)
    assert [(event.step, event.skipped, event.tensor) for event in session.events] == [(0, True, "0.weight")]
    assert [change.scale for change in session.progress.scales] == [1024.0, 512.0]
    assert run.scaler.skipped_steps == 1
    alone = Run(kind, LossScaler("cpu", 1024.0))
    alone.poisoned = {0}
    for _ in range(4):
        alone.step()
    assert all(map(torch.equal, run.weights, alone.weights))


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs with line search"])
def test_the_inspector_counts_a_step_undone_in_a_later_evaluation_as_skipped(kind: str) -> None:
    """The optimizer's step starts but does not complete."""
    run, session = inspected(kind, {2})
    assert run.scaler.skipped_steps == 1
    assert (session.progress.steps, session.progress.skipped_steps) == (4, 1)
    assert [(event.step, event.skipped, event.tensor) for event in session.events] == [(0, True, "0.weight")]
