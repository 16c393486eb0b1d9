"""An infinity, then a NaN, planted in the forward, then the backward, of every module of three networks in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import SUBJECTS, Subject
from torch import nn

from mpinspect import Inspector

PLANTED_AT = 2
STEPS = 4


class _SpoilGradient(torch.autograd.Function):
    """Passes values on, and in the backward a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plant: Plant) -> torch.Tensor:
        ctx.plant = plant
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.plant.spoil(gradient), None


class Plant:
    """Spoils one module at one step."""

    def __init__(self, module: nn.Module, value: float) -> None:
        self.module = module
        self.value = value
        self.armed = False
        self.fired = False

    def spoil(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fired = True
        return torch.full_like(tensor, self.value)

    def output(self) -> None:
        """In the forward: what the module returns."""
        self._around(lambda call, args, kwargs: _first_replaced(call(*args, **kwargs), lambda y: y + self.spoil(y)))

    def gradient_going_in(self) -> None:
        """In the backward: behind the module's output, before its own work."""
        self._around(
            lambda call, args, kwargs: _first_replaced(call(*args, **kwargs), lambda y: _SpoilGradient.apply(y, self))
        )

    def gradient_coming_out(self) -> None:
        """In the backward: what the module passes on to its input."""

        def spoiled(call: Any, args: Any, kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                args = (_SpoilGradient.apply(args[0], self), *args[1:])
            return call(*args, **kwargs)

        self._around(spoiled)

    def forward_hook(self) -> None:
        """In the forward: a hook of somebody else's that comes after ours."""
        self.module.register_forward_hook(
            lambda module, args, y: _first_replaced(y, lambda t: t + self.spoil(t)) if self.armed else None
        )

    def full_backward_hook(self) -> None:
        """In the backward: a full backward hook that changes the gradient of the input."""

        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            if self.armed and any(gradient is not None for gradient in grad_input):
                return tuple(None if gradient is None else self.spoil(gradient) for gradient in grad_input)
            return None

        self.module.register_full_backward_hook(hook)

    def _around(self, spoiled: Callable[[Any, Any, Any], Any]) -> None:
        call = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return spoiled(call, args, kwargs) if self.armed else call(*args, **kwargs)

        self.module.forward = forward  # type: ignore[method-assign]


def _first_replaced(output: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return replace(output)
    if isinstance(output, tuple):
        return (_first_replaced(output[0], replace), *output[1:])
    first = next(iter(output))
    output[first] = _first_replaced(output[first], replace)
    return output


def _train(subject: Subject, plant: Plant) -> None:
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(STEPS):
        plant.armed = step == PLANTED_AT
        loss = subject.loss(subject.model, subject.batch())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


FORWARD_PLANTS = ("output", "forward_hook")
BACKWARD_PLANTS = ("gradient_going_in", "gradient_coming_out", "full_backward_hook")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("place", FORWARD_PLANTS + BACKWARD_PLANTS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_names_module_step_and_phase(name: str, place: str, value: float) -> None:
    """Every module in turn: exactly the planted module, step and phase are named, at a step that is not sampled."""
    paths = [path for path, _ in SUBJECTS[name]().model.named_modules()]
    in_place = {"norm", "relu"} if name == "cnn" and place == "full_backward_hook" else set()
    told = {}
    for path in paths:
        if path in in_place:
            continue  # torch itself refuses full backward hooks around an in-place ReLU
        torch.manual_seed(0)
        subject = SUBJECTS[name]()
        plant = Plant(subject.model.get_submodule(path), value)
        with Inspector(subject.model, every=50) as inspector:
            getattr(plant, place)()
            _train(subject, plant)
        if plant.fired:
            told[path] = inspector.session()
    expected_phase = "forward" if place in FORWARD_PLANTS else "backward"
    # Modules that are never called (containers of lists), and inputs that need no gradient, can't be planted.
    assert len(told) >= len(paths) // 2
    for path, session in told.items():
        events = session.events
        assert events, path
        first = events[0]
        assert (first.step, first.phase, first.module) == (PLANTED_AT, expected_phase, path), first
        assert first.value in (("inf", "nan") if value == math.inf else ("nan",))
        assert first.loss_scale == 16.0
        assert not session.notes


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_clean_run_has_no_events(name: str) -> None:
    subject = SUBJECTS[name]()
    with Inspector(subject.model) as inspector:
        _train(subject, Plant(nn.Identity(), math.inf))
    assert inspector.session().events == ()
    assert inspector.session().progress.steps == STEPS


def test_skipped_step_keeps_the_last_maxima() -> None:
    """The event of a skipped step says that it was skipped and what the tensor's largest magnitudes were before."""
    torch.manual_seed(0)
    subject = SUBJECTS["cnn"]()
    plant = Plant(subject.model.get_submodule("head"), math.inf)
    plant.gradient_coming_out()
    with Inspector(subject.model, every=50) as inspector:
        _train(subject, plant)
    (event,) = inspector.session().events
    assert event.skipped is True
    assert event.forward_finite is True
    assert event.gradients_finite is False
    assert len(event.last_maxima) == PLANTED_AT
    assert all(0 < value < 100 for value in event.last_maxima)
    assert inspector.session().progress.skipped_steps == 1


def test_a_weight_gradient_alone_is_named_by_the_scaler_skipping() -> None:
    """With a GradScaler weight gradients are only looked at once its own found_inf has made it skip."""
    torch.manual_seed(0)
    subject = SUBJECTS["cnn"]()
    weight = subject.model.get_submodule("block.conv").weight
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with Inspector(subject.model, every=50) as inspector:
        for step in range(3):
            scaler.scale(subject.loss(subject.model, subject.batch())).backward()
            if step == 1:
                weight.grad[0, 0, 0, 0] = math.nan
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (event,) = inspector.session().events
    assert (event.step, event.module, event.what, event.tensor) == (
        1,
        "block.conv",
        "weight_gradient",
        "block.conv.weight",
    )
    assert event.value == "nan"


def test_without_a_scaler_weight_gradients_are_watched() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * math.inf)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, every=50) as inspector:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    first = inspector.session().events[0]
    assert (first.phase, first.what, first.tensor) == ("backward", "weight_gradient", "weight")


def test_an_infinite_mask_does_no_harm() -> None:
    """A module that returns -inf on purpose, with every gradient finite, is told once and marked as harmless."""

    class Mask(nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Mask(), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().sum().backward()
            optimizer.step()
    (event,) = inspector.session().events
    assert event.module == "1"
    assert event.gradients_finite is True
    assert {finding.severity for finding in inspector.report().findings} <= {"info"}


def test_a_mask_does_not_hide_the_culprit() -> None:
    class Mask(nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Mask(), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plant = Plant(model[1], math.nan)
    plant.gradient_coming_out()
    with Inspector(model) as inspector:
        for step in range(4):
            plant.armed = step == 2
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().sum().backward()
            if step != 2:
                optimizer.step()
    told = [(event.step, event.phase, event.module) for event in inspector.session().events]
    assert told[:2] == [(0, "forward", "2"), (2, "backward", "1")]


def test_infinite_data_is_told_from_an_infinite_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with Inspector(model) as inspector:
        model(torch.full((2, 4), math.nan)).sum().backward()
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.tensor) == ("forward", "", "0")
    assert "data" in event.explanation


def test_an_fp16_loss_makes_the_first_gradient_infinite() -> None:
    """The gradient of an FP16 scalar loss is the scale itself, and 2^16 is infinite in FP16."""
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with Inspector(model) as inspector:
        scaler.scale(model(torch.ones(2, 4)).square().mean().to(torch.float16)).backward()
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.forward_finite) == ("backward", "", True)
    assert "loss" in event.explanation


def test_a_scaled_loss_that_overflows() -> None:
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Inspector(model) as inspector:
        scaler.scale(model(torch.ones(2, 4)).square().mean() * 1e3).backward()
    event = inspector.session().events[0]
    assert (event.phase, event.what, event.forward_finite) == ("backward", "scaled_loss", True)
    assert event.explanation == "the loss was finite, and multiplied by the loss scale it was not"


def test_a_loss_that_overflows_before_it_is_scaled() -> None:
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Inspector(model) as inspector:
        scaler.scale(model(torch.ones(2, 4)).square().mean() * 1e30 * 1e30).backward()
    event = inspector.session().events[0]
    assert (event.phase, event.what, event.forward_finite) == ("forward", "loss", False)
    assert "loss function" in event.explanation


def test_an_infinite_scaled_loss_with_finite_gradients_is_nothing() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with Inspector(model) as inspector:
        scaler.scale(model(torch.ones(2, 4)).mean() + 1000).backward()
        scaler.step(optimizer)
        scaler.update()
    session = inspector.session()
    assert (session.progress.steps, session.progress.skipped_steps, session.events) == (1, 0, ())


def test_a_scale_that_is_found_by_skipping_does_no_harm() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Inspector(model) as inspector:
        for _ in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean() * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
    report = inspector.report()
    assert report.session.progress.skipped_steps >= 4
    assert {finding.severity for finding in report.findings if finding.id == "non-finite-event"} == {"info"}


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", [_Interrupted, KeyboardInterrupt])
def test_an_exception_loses_nothing(kind: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    """The step under way is judged, the report is printed, the exception goes on, no hook stays."""
    subject = SUBJECTS["lstm"]()
    plant = Plant(subject.model.get_submodule("norm"), math.nan)
    plant.output()
    plant.armed = True

    def broken_run() -> Inspector:
        with Inspector(subject.model) as inspector:
            held.append(inspector)
            loss = subject.loss(subject.model, subject.batch())
            if not torch.isfinite(loss):
                raise kind("loss is not finite")
        return inspector

    held: list[Inspector] = []
    with pytest.raises(kind):
        broken_run()
    event = held[0].session().events[0]
    assert (event.step, event.phase, event.module, event.value) == (0, "forward", "norm", "nan")
    assert "norm" in capsys.readouterr().err
    assert not any(module._forward_hooks for module in subject.model.modules())


def test_the_watch_can_be_turned_off() -> None:
    subject = SUBJECTS["cnn"]()
    plant = Plant(subject.model.get_submodule("head"), math.nan)
    plant.output()
    with Inspector(subject.model, watch=False) as inspector:
        _train(subject, plant)
    assert inspector.session().events == ()


def test_accumulation_names_the_micro_batch() -> None:
    subject = SUBJECTS["cnn"]()
    plant = Plant(subject.model.get_submodule("block.norm"), math.inf)
    plant.output()
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    with Inspector(subject.model, every=50) as inspector:
        for step in range(2):
            for micro_batch in range(3):
                plant.armed = (step, micro_batch) == (1, 2)
                subject.loss(subject.model, subject.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    event = inspector.session().events[0]
    assert (event.step, event.micro_batch, event.module) == (1, 2, "block.norm")


def test_weights_that_are_broken_already_are_named() -> None:
    """The optimizer made them so a step before; the module's arithmetic is not to blame."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 0:
                with torch.no_grad():
                    model[1].weight[0, 0] = math.nan
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (1, "forward", "1")
    assert "'1.weight' itself is not finite" in event.explanation


def test_the_cause_is_told_before_its_consequences() -> None:
    """sqrt(0) in the backward of one step breaks the weights; every later forward is not finite for that reason."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        for step in range(5):
            optimizer.zero_grad()
            y = model(torch.ones(1, 2)).square().sum()
            (y * 0).sqrt().backward() if step == 2 else y.backward()
            optimizer.step()
    findings = [finding for finding in inspector.report().findings if finding.id == "non-finite-event"]
    assert len(findings) == 1
    assert findings[0].severity == "error"
    assert "The backward was not finite" in findings[0].message
    assert "step 2" in findings[0].message


def test_a_forward_that_breaks_does_not_blame_the_weights_its_step_then_broke() -> None:
    """relu + log: the infinity arises in the model's own code; only its gradients make the weights NaN."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, shift: float) -> torch.Tensor:
            return self.decoder(torch.log(torch.relu(self.encoder(x)) + shift))

    torch.manual_seed(0)
    model = Logs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    finite = []
    with Inspector(model) as inspector:
        for step in range(5):
            finite.append(all(bool(weight.isfinite().all()) for weight in model.parameters()))
            optimizer.zero_grad()
            model(torch.randn(8, 4), 0.0 if step == 3 else 1.0).sum().backward()
            optimizer.step()
    assert finite == [True] * 4 + [False]
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (3, "forward", "")
    assert "itself is not finite" not in event.explanation
    assert "before 'decoder', whose input was not finite already" in event.explanation
