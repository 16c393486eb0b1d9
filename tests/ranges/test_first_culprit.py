"""The watch names the module of the first infinity or NaN, planted in the forward or backward of every module in turn."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import host_kernels
import pytest
import torch
from models import SUBJECTS, Of, Subject, Times
from torch import nn
from trainings import cpu_scaler, inspected, sgd, take_step

import mpinspect
from mpinspect import Inspector
from mpinspect.ranges.session import Event, is_below

PLANTED_AT = 2


class _SpoilGradient(torch.autograd.Function):
    """Returns its input, and passes a non-finite gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plant: Plant) -> torch.Tensor:
        ctx.plant = plant
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.plant.spoil(gradient), None


class Plant:
    """Plants a non-finite value in one module at one step."""

    def __init__(self, module: nn.Module, value: float) -> None:
        self.module = module
        self.value = value
        self.armed = False
        self.fired = False

    def spoil(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fired = True
        return torch.full_like(tensor, self.value)

    def output(self) -> None:
        """Spoil the module's output in the forward."""
        self._around(lambda call, args, kwargs: _first_replaced(call(*args, **kwargs), lambda y: y + self.spoil(y)))

    def gradient_going_in(self) -> None:
        """Spoil the gradient of the module's output, before the module's own backward."""
        self._around(
            lambda call, args, kwargs: _first_replaced(call(*args, **kwargs), lambda y: _SpoilGradient.apply(y, self))
        )

    def gradient_coming_out(self) -> None:
        """Spoil the gradient of the module's input in the backward."""

        def spoiled(call: Any, args: Any, kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                args = (_SpoilGradient.apply(args[0], self), *args[1:])
            return call(*args, **kwargs)

        self._around(spoiled)

    def forward_hook(self) -> None:
        """Spoil the output in a forward hook that runs after the inspector's."""
        self.module.register_forward_hook(
            lambda module, args, y: _first_replaced(y, lambda t: t + self.spoil(t)) if self.armed else None
        )

    def full_backward_hook(self) -> None:
        """Spoil the gradient of the input in a full backward hook."""

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


def _train(subject: Subject, plant: Plant, planted_at: int = PLANTED_AT) -> None:
    optimizer, scaler = sgd(subject.model, 1e-3), cpu_scaler(16.0)
    for step in range(planted_at + 2):
        plant.armed = step == planted_at
        take_step(optimizer, subject.loss(subject.model, subject.batch()), scaler)


FORWARD_PLANTS = ("output", "forward_hook")
BACKWARD_PLANTS = ("gradient_going_in", "gradient_coming_out", "full_backward_hook")


#: Every pair of a model and a place, and of a place and a value.
PLANTS = [
    (name, place, (math.inf, math.nan)[(i + j) % 2])
    for i, name in enumerate(SUBJECTS)
    for j, place in enumerate(FORWARD_PLANTS + BACKWARD_PLANTS)
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
@pytest.mark.parametrize(("name", "place", "value"), PLANTS)
def test_the_planted_module_step_and_phase_are_named(name: str, place: str, value: float) -> None:
    """The value is planted in every module, at a step that is not sampled. Of GPT-2's many modules each place takes one half."""
    places = FORWARD_PLANTS + BACKWARD_PLANTS
    _check_every_module(name, place, value, PLANTED_AT, every_other=places.index(place) % 2 if name == "gpt2" else None)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("cnn", "forward_hook", math.inf),
        ("lstm", "gradient_coming_out", math.nan),
        ("gpt2", "output", math.nan),
        ("gpt2", "gradient_coming_out", math.inf),
    ],
)
def test_the_planted_module_is_named_if_a_device_reads_few_tensors_in_groups(
    name: str, place: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.install(monkeypatch)
    # Step 6 is neither sampled nor measured, and follows the steps in which the watch reads every tensor. GPT-2 has so
    # many modules that from then on only its blocks and the modules around them are read.
    every_other = FORWARD_PLANTS.count(place) if name == "gpt2" else None
    blocks = ("transformer.h.0", "transformer.h.1")
    _check_every_module(name, place, value, planted_at=6, blocks=blocks, every_other=every_other)


def _check_every_module(
    name: str, place: str, value: float, planted_at: int, blocks: tuple[str, ...] = (), every_other: int | None = None
) -> None:
    """Check every module, or ``every_other`` from the first (0) or second (1) on."""
    torch.manual_seed(0)
    made = SUBJECTS[name]()
    # GPT-2's two blocks are alike: the second has plants as a whole, and in one of its layers.
    paths = [
        path
        for path, _ in made.model.named_modules()
        if not path.startswith("transformer.h.1.") or path == "transformer.h.1.mlp.c_fc"
    ]
    if every_other is not None:
        paths = paths[every_other::2]
    in_place = {"norm", "relu"} if name == "cnn" and place == "full_backward_hook" else set()
    told = {}
    for path in paths:
        if path in in_place:
            continue  # torch itself refuses full backward hooks around an in-place ReLU
        torch.manual_seed(0)
        subject = replace(made, model=copy.deepcopy(made.model))
        plant = Plant(subject.model.get_submodule(path), value)
        with Inspector(subject.model, every=50) as inspector:
            getattr(plant, place)()
            _train(subject, plant, planted_at)
        if plant.fired:
            told[path] = inspector.session()
    expected_phase = "forward" if place in FORWARD_PLANTS else "backward"
    # A plant never fires in modules that are never called (lists), or whose input needs no gradient.
    assert len(told) >= len(paths) // 2
    for path, session in told.items():
        events = session.events
        assert events, path
        first = events[0]
        expected = next((block for block in blocks if is_below(path, block)), path)
        assert (first.step, first.phase, first.module) == (planted_at, expected_phase, expected), first
        assert ("inside it were not observed" in first.explanation) is (expected in blocks)
        assert first.value in (("inf", "nan") if value == math.inf else ("nan",))
        assert first.loss_scale == 16.0
        assert not session.notes


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_clean_run_has_no_events(name: str) -> None:
    subject = SUBJECTS[name]()
    with Inspector(subject.model) as inspector:
        _train(subject, Plant(nn.Identity(), math.inf))
    assert inspector.session().events == ()
    assert inspector.session().progress.steps == PLANTED_AT + 2


def test_the_event_of_a_skipped_step_contains_the_last_maxima() -> None:
    """The event states that the step was skipped, and lists the tensor's largest magnitudes of the steps before."""
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


def test_a_non_finite_weight_gradient_is_named_after_the_scaler_skips() -> None:
    """With a GradScaler, weight gradients are read only after a skipped step."""
    subject = SUBJECTS["cnn"]()
    weight = subject.model.get_submodule("block.conv").weight
    optimizer, scaler = sgd(subject.model, 1e-3), cpu_scaler(16.0)
    with Inspector(subject.model, every=50) as inspector:
        for step in range(3):
            scaler.scale(subject.loss(subject.model, subject.batch())).backward()
            if step == 1:
                weight.grad[0, 0, 0, 0] = math.nan
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (event,) = inspector.session().events
    assert (event.step, event.module, event.value) == (1, "block.conv", "nan")
    assert (event.what, event.tensor) == ("weight_gradient", "block.conv.weight")


def test_weight_gradients_are_watched_without_a_scaler() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * math.inf)
    first = inspected(model, lambda step: model(torch.ones(2, 4)).sum(), 2, every=50).session().events[0]
    assert (first.phase, first.what, first.tensor) == ("backward", "weight_gradient", "weight")


class _Mask(nn.Module):
    """Returns -inf on purpose."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)


def test_an_infinite_mask_is_reported_once_as_harmless() -> None:
    model = nn.Sequential(_linear(), _Mask(), nn.Softmax(-1))
    inspector = inspected(model, lambda step: model(torch.randn(4, 4)).square().sum(), 3, optimizers=None)
    (event,) = inspector.session().events
    assert event.module == "1"
    assert event.gradients_finite is True
    assert {finding.severity for finding in inspector.report().findings} <= {"info"}


def test_a_mask_does_not_hide_the_culprit() -> None:
    model = nn.Sequential(_linear(), nn.Tanh(), _Mask(), nn.Softmax(-1))
    optimizer, plant = sgd(model), Plant(model[1], math.nan)
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


def test_the_module_whose_mask_hides_a_whole_row_is_the_culprit_beside_token_ids() -> None:
    """The model's only floating-point input is the mask."""
    attention = Of(lambda self, x, mask: self.out((self.scores(x) + mask).softmax(-1)), scores=_linear(), out=_linear())
    model = Of(
        lambda self, ids, mask: self.attention(self.embed(ids), mask), embed=nn.Embedding(8, 4), attention=attention
    )
    with Inspector(model) as inspector:
        model(torch.arange(4), torch.tensor([[-math.inf] * 4, *[[0.0] * 4] * 3])).sum().backward()
    first = inspector.session().events[0]
    assert (first.phase, first.module, first.value) == ("forward", "attention", "nan")


def test_a_model_that_returns_a_mask_does_not_excuse_the_loss() -> None:
    model = nn.Sequential(_linear(), _Mask())

    def loss(step: int) -> torch.Tensor:
        return model(torch.randn(4, 4)).softmax(-1).square().sum() + (math.inf if step == 2 else 0.0)

    inspector = inspected(model, loss, 3, scaler=cpu_scaler(1.0), optimizers=None)
    told = [(event.step, event.what, event.module) for event in inspector.session().events]
    assert told == [(0, "activation", "1"), (2, "loss", "")]


def test_a_nan_in_the_data_is_not_attributed_to_a_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with Inspector(model) as inspector:
        model(torch.full((2, 4), math.nan)).sum().backward()
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.tensor) == ("forward", "", "0")
    assert "data" in event.explanation


@pytest.mark.parametrize(
    ("scale", "of_loss", "phase", "what", "forward_finite", "explanation"),
    [
        # The first gradient of an FP16 loss is the scale itself, and 2^16 is infinite in FP16.
        (2.0**16, lambda loss: loss.to(torch.float16), "backward", "activation_gradient", True, "loss"),
        (2.0**127, lambda loss: loss * 1e3, "backward", "scaled_loss", True, "its product with the loss scale was not"),
        (2.0, lambda loss: loss * 1e30 * 1e30, "forward", "loss", False, "loss function"),
    ],
    ids=["an FP16 loss", "the scaled loss", "the loss before scaling"],
)
def test_an_overflow_of_the_loss_is_named(
    scale: float, of_loss: Any, phase: str, what: str, forward_finite: bool, explanation: str
) -> None:
    model = nn.Linear(4, 1)
    with Inspector(model) as inspector:
        cpu_scaler(scale).scale(of_loss(model(torch.ones(2, 4)).square().mean())).backward()
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.what, event.forward_finite) == (phase, "", what, forward_finite)
    assert explanation in event.explanation


def test_an_infinite_scaled_loss_with_finite_gradients_is_not_an_event() -> None:
    model = nn.Linear(4, 1)
    options = {"lr": 1e-3, "scaler": cpu_scaler(2.0**120), "optimizers": None}
    session = inspected(model, lambda step: model(torch.ones(2, 4)).mean() + 1000, 1, **options).session()
    assert (session.progress.steps, session.progress.skipped_steps, session.events) == (1, 0, ())


def test_overflows_while_the_scaler_finds_its_scale_are_info_findings() -> None:
    model = nn.Linear(4, 1)
    options = {"lr": 1e-3, "scaler": cpu_scaler(2.0**127), "optimizers": None}
    report = inspected(model, lambda step: model(torch.ones(2, 4)).square().mean() * 1e3, 12, **options).report()
    assert report.session.progress.skipped_steps >= 4
    assert {finding.severity for finding in report.findings if finding.id == "non-finite-event"} == {"info"}


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", [_Interrupted, KeyboardInterrupt])
def test_an_exception_in_the_loop_does_not_lose_the_event(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """The inspector judges the interrupted step, prints the report, removes its hooks and re-raises the exception."""
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


def test_the_event_names_the_micro_batch_under_accumulation() -> None:
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


def test_a_weight_that_is_already_nan_is_named() -> None:
    """The weight became NaN after the last step; the module's arithmetic is correct."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def breaks(step: int) -> None:
        if step == 0:
            model[1].weight[0, 0] = math.nan

    inspector = inspected(model, lambda step: model(torch.ones(2, 4)).sum(), 3, after_step=breaks, optimizers=None)
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (1, "forward", "1")
    assert "'1.weight' itself is not finite" in event.explanation


def test_the_cause_is_reported_before_its_consequences() -> None:
    """sqrt(0) in one backward makes the weights NaN, and therefore every later forward."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        for step in range(5):
            optimizer.zero_grad()
            y = model(torch.ones(1, 2)).square().sum()
            (y * 0).sqrt().backward() if step == 2 else y.backward()
            optimizer.step()
    cause, *others = inspector.report().findings
    assert (cause.id, cause.severity, cause.step) == ("argument-out-of-range", "error", 2)
    events = [finding for finding in others if finding.id == "non-finite-event"]
    assert len(events) == 1
    assert "The backward was not finite" in events[0].message
    assert "step 2" in events[0].message


def test_weights_that_became_nan_later_in_the_step_are_not_the_culprit() -> None:
    """The infinity arises in the model's relu + log; only its gradients then make the weights NaN."""
    model = Of(
        lambda self, x, shift: self.decoder(torch.log(torch.relu(self.encoder(x)) + shift)),
        encoder=_linear(),
        decoder=nn.Linear(4, 1),
    )
    finite = []

    def loss(step: int) -> torch.Tensor:
        finite.append(all(bool(weight.isfinite().all()) for weight in model.parameters()))
        return model(torch.randn(8, 4), 0.0 if step == 3 else 1.0).sum()

    event = inspected(model, loss, 5, lr=1e-3, optimizers=None).session().events[0]
    assert finite == [True] * 4 + [False]
    assert (event.step, event.phase, event.module) == (3, "forward", "")
    assert "itself is not finite" not in event.explanation
    assert "before 'decoder', whose input already held it" in event.explanation


# -- culprits that are known by construction ---------------------------------------------------------------------------------


class _Scaled(nn.Module):
    """A leaf of a type unknown to the inspector, so its arithmetic may cause any infinity or NaN."""

    def __init__(self, factor: float = 1.0, in_backward: float = 1.0) -> None:
        super().__init__()
        self.factor, self.in_backward = factor, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Times.apply(x, self.factor, self.in_backward)


def _linear() -> nn.Linear:
    return nn.Linear(4, 4)


def _chain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x))


def _divided_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x) / 0)


def _state_divided_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Call one cell three times, and divide the state by 0 before the third call."""
    state = x
    for divisor in (1.0, 2.0, 0.0):
        state = self.cell(state / divisor)
    return state


def _breaks_in_its_second_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a cell three times on copies of its state, so that no module made the third call's infinite input."""
    state = x
    for factor in (1.0, math.inf, 1.0):
        self.cell.factor = factor
        state = self.cell(state * 1.0)
    return state


def _residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.b(self.a(x))


def _broken_backward(x: torch.Tensor) -> torch.Tensor:
    """Return zeros, with an infinite or NaN gradient."""
    return torch.sqrt(x * 0)


def _shared_with_code(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    return self.b(hidden) + _broken_backward(hidden)


def _shared_with_sound_code(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    return self.b(hidden) + hidden


def _shared_by_two(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.a(x)
    return self.b(hidden) + self.c(hidden)


def _nested(code: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    """Return a container that runs the code, within a model."""
    return nn.Sequential(Of(code, **parts))


def _tied() -> nn.Module:
    layer = _linear()
    return nn.Sequential(layer, _Scaled(math.inf), layer)


_GOOD, _NAN = torch.linspace(-1, 1, 8).view(2, 4), torch.full((2, 4), math.nan)
_FINITE, _LATE = "its input was finite", "the gradient at its input was not"
_CODE = "the inf or NaN arose in the code of"
_FIRST = "is the first module that received it"
#: Model and batch; words of the explanation. The NaN is always attributed to the data.
FROM_DATA: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a batch that was NaN": (
        lambda: _nested(_chain, a=_linear(), b=_linear()),
        _NAN,
        "it was in the data, or arose in code before the model; '0.a' is the first",
    ),
    "a batch that was NaN, changed on its way": (
        lambda: _nested(lambda self, x: self.a(x.view(4, 2).T.reshape(2, 4) * 2), a=_linear()),
        _NAN,
        f"'0.a' {_FIRST}",
    ),
    "a batch that was NaN, by keyword": (
        lambda: Of(lambda self, x: self.block(x=x * 1), block=Of(lambda self, x: self.a(input=x), a=_linear())),
        _NAN,
        f"'block.a' {_FIRST}",
    ),
    "a batch that was NaN, in a dictionary": (
        lambda: Of(lambda self, batch: self.a(batch["x"][0] * 1), a=_linear()),
        {"x": (_NAN, 3)},
        f"'a' {_FIRST}",
    ),
    "a batch that was NaN, used by no module": (
        lambda: Of(lambda self, x: x * self.a.weight.sum(), a=_linear()),
        _NAN,
        "it was in the data, or arose in code before the model",
    ),
    "a batch that was NaN, through modules that hand it on": (
        lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.0), _linear()),
        _NAN,
        _FIRST,
    ),
    "a batch that was NaN, repaired before the end": (
        lambda: Of(lambda self, x: torch.nan_to_num(self.block(x * 1)), block=Of(_chain, a=_linear(), b=_linear())),
        _NAN,
        f"'block.a' {_FIRST}",
    ),
}
#: Model, the expected module and words of the explanation, for a finite batch.
IN_FORWARD: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "code between modules": (
        lambda: _nested(_divided_between, a=_linear(), b=_linear()),
        *("0", "in the code of '0' before '0.b'"),
    ),
    "code of the outer container": (
        lambda: _nested(lambda self, x: self.block(x / 0), block=Of(_chain, a=_linear(), b=_linear())),
        *("0", "in the code of '0' before '0.block'"),
    ),
    "code around a list that is never called": (
        lambda: Of(lambda self, x: self.layers[1](self.layers[0](x) / 0), layers=nn.ModuleList([_linear(), _linear()])),
        *("", "in the model's own code before 'layers.1'"),
    ),
    "code that normalises": (
        lambda: _nested(lambda self, x: self.b(x * 0 / (x * 0).sum()), b=_linear()),
        *("0", "in the code of '0' before '0.b'"),
    ),
    "an in-place activation after code": (
        lambda: _nested(lambda self, x: self.act(x.abs() / 0), act=nn.ReLU(inplace=True)),
        *("0", "before '0.act', whose input already held it"),
    ),
    "an in-place activation after a module": (
        lambda: nn.Sequential(_Scaled(math.inf), nn.ReLU(inplace=True)),
        *("0", _FINITE),
    ),
    "a module of no known kind": (lambda: nn.Sequential(_linear(), _Scaled(math.inf), _linear()), "1", _FINITE),
    "a container's own code at its end": (lambda: _nested(lambda self, x: self.a(x) / 0, a=_linear()), "0", _FINITE),
    "a branch beside a residual stream": (
        lambda: nn.Sequential(Of(_residual, a=_linear(), b=_Scaled(math.nan)), _linear()),
        *("0.b", _FINITE),
    ),
    "a cell used three times, after code": (
        lambda: _nested(_state_divided_between, cell=_Scaled()),
        *("0", "in the code of '0' before '0.cell'"),
    ),
    "a cell that breaks in its second call": (
        lambda: _nested(_breaks_in_its_second_call, cell=_Scaled()),
        *("0.cell", _FINITE),
    ),
    "between two uses of one module": (_tied, "1", _FINITE),
}
IN_BACKWARD: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "code that shares a module's input": (lambda: _nested(_shared_with_code, a=_linear(), b=_linear()), "0", _CODE),
    "code that shares an activation's input": (
        lambda: _nested(_shared_with_code, a=_linear(), b=nn.Tanh()),
        "0",
        _CODE,
    ),
    "a module that shares its input with code": (
        lambda: _nested(_shared_with_sound_code, a=_linear(), b=_Scaled(1.0, math.inf)),
        *("0.b", _LATE),
    ),
    "the first of two modules": (
        lambda: _nested(_shared_by_two, a=_linear(), b=_Scaled(1.0, math.nan), c=_linear()),
        *("0.b", _LATE),
    ),
    "the second of two modules": (
        lambda: _nested(_shared_by_two, a=_linear(), b=nn.ReLU(), c=_Scaled(1.0, math.nan)),
        *("0.c", _LATE),
    ),
    "a branch beside a residual stream": (
        lambda: nn.Sequential(_linear(), Of(_residual, a=_Scaled(1.0, math.inf), b=_linear())),
        *("1.a", _LATE),
    ),
    "code between modules": (
        lambda: _nested(lambda self, x: self.b(_broken_backward(self.a(x))), a=_linear(), b=_linear()),
        *("0", _CODE),
    ),
    "code at a container's end": (
        lambda: nn.Sequential(_linear(), Of(lambda self, x: Times.apply(self.a(x), 1.0, math.inf), a=_linear())),
        *("1", _CODE),
    ),
}
#: Model and batch; the expected phase, module and words.
CASES = {
    **{name: (make, batch, "forward", "", words) for name, (make, batch, words) in FROM_DATA.items()},
    **{name: (make, _GOOD, "forward", *expected) for name, (make, *expected) in IN_FORWARD.items()},
    **{f"backward: {name}": (make, _GOOD, "backward", *expected) for name, (make, *expected) in IN_BACKWARD.items()},
}


#: Model, batch; the expected phase, module and whether it arose after that module; words of the explanation.


@pytest.mark.parametrize(
    "kinds", [("weight_gradient", "activation_gradient", "activation"), ()], ids=["sampled", "watched"]
)
@pytest.mark.parametrize("name", CASES)
def test_each_constructed_culprit_is_named(name: str, kinds: tuple[str, ...]) -> None:
    make, batch, phase, module, words = CASES[name]
    model = make()
    parameters = list(model.parameters()) or [nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpinspect.MpinspectWarning)
        inspector = Inspector(model, capture=kinds, optimizers=optimizer).attach()
        loss = model(batch).square().sum()
        if loss.requires_grad:
            loss.backward()
            # Clipping makes every gradient NaN, and the step every weight, before the watch judges.
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        inspector.detach()
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.after) == (phase, module, False), event
    assert words in event.explanation


def _first_spoiled(model: nn.Module, outputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Event:
    """Return the first event of a backward in which the code after the model spoils the gradient of the first output."""
    with Inspector(model, capture=(), optimizers=sgd(model)) as inspector:
        one, other = outputs()
        # The square root's gradient at zero is infinite.
        ((one - one.detach()).square().sum().sqrt() + other.square().sum()).backward()
    return inspector.session().events[0]


def test_code_after_the_model_is_the_culprit_if_it_spoils_one_of_two_calls() -> None:
    model = nn.Sequential(_linear(), nn.Tanh(), nn.Linear(4, 2))
    event = _first_spoiled(model, lambda: (model(_GOOD), model(_GOOD + 1)))
    assert (event.phase, event.module, event.after) == ("backward", "2", True)
    assert "in the backward of the code after this module" in event.explanation


def test_code_after_a_model_is_the_culprit_if_it_spoils_one_of_two_outputs() -> None:
    model = Of(lambda self, x: (self.one(x), self.other(x)), one=nn.Linear(4, 2), other=nn.Linear(4, 2))
    event = _first_spoiled(model, lambda: model(_GOOD))
    assert (event.phase, event.module, event.after) == ("backward", "one", True)


def test_finite_inputs_that_overflow_under_autocast_are_reported_with_their_maximum() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with Inspector(model, capture=(), optimizers=sgd(model)) as inspector:
        with torch.autocast("cpu", torch.float16):
            output = model(torch.full((2, 4), 1e5))
        output.float().sum().backward()
    assert "its input was finite, up to 1e+05" in inspector.session().events[0].explanation
