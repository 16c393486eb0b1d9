"""Reports on broken runs with little evidence: weights that broke in unwatched steps, the loss, a scale that is too large."""

import contextlib
import dataclasses
import math
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
from agreeing_reports import analyse
from models import Of
from torch import nn
from trainings import cpu_scaler, inspected, sgd, take_step

from mpinspect import Inspector, Session
from mpinspect.ranges.analysis.first_line import first_line
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.faults.registry import what_broke
from mpinspect.ranges.records import BrokenLoss, recorded
from mpinspect.reporting.finding import Finding


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _of_infinite_slope(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss plus the square root of zero, which has an infinite derivative."""
    return loss + (loss - loss).sqrt()


def _trained(
    steps: int = 6,
    *,
    broken_at: int = -1,
    broken: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss * math.nan,
    model: nn.Sequential | None = None,
    **options: Any,
) -> Inspector:
    """Train with a loss that is broken in one step."""
    model = _network() if model is None else model
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)

    def loss_of(step: int) -> torch.Tensor:
        loss = model(torch.ones(3, 4)).square().mean()
        return broken(loss) if step == broken_at else loss

    return inspected(model, loss_of, steps, optimizer=optimizer, **options)


def _passing_on() -> nn.Sequential:
    """Return a model of one layer whose outputs are its inputs."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    return nn.Sequential(layer)


def _operators(inspector: Inspector) -> list[str]:
    return [str(each.evidence.get("operator")) for each in inspector.report().findings]


def _cause(inspector: Inspector, step: int, layer: str = "") -> Finding:
    """Return the first finding, which is an argument out of range in this step."""
    cause = inspector.report().findings[0]
    assert (cause.id, cause.severity, cause.step, cause.layer) == ("argument-out-of-range", "error", step, layer)
    return cause


def _the_finding(inspector: Inspector) -> Finding:
    (finding,) = (each for each in inspector.report().findings if each.id == "non-finite-event")
    return finding


# -- losses without a backward ------------------------------------------------------------------------------------------


def _left_out(ends: str, broken_at: int = 3, steps: int = 5, made: str = "loss") -> Inspector:
    """Train with a logarithm of zero in one step, whose backward the loop leaves out: it raises, breaks or continues."""
    model = _network()
    optimizer = sgd(model)
    with contextlib.suppress(ValueError), Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            zero = 0.0 if step == broken_at else 1.0
            loss = ((model(torch.ones(3, 4)) * 0 + zero).log()).mean()
            parts = {"total": loss} if made == "dict" else loss
            if not loss.isfinite():
                if made == "dict":
                    del loss
                if ends == "raises":
                    raise ValueError(f"not finite: {parts}")
                if ends == "breaks":
                    break
                continue
            take_step(optimizer, loss)
    return inspector


@pytest.mark.parametrize("made", ["loss", "dict"])
@pytest.mark.parametrize("ends", ["raises", "breaks", "continues"])
def test_a_loss_that_the_loop_leaves_out_is_an_event_with_its_operator(ends: str, made: str) -> None:
    inspector = _left_out(ends, made=made)
    (event,) = inspector.session().events
    assert (event.step, event.phase, event.what, event.value) == (3, "forward", "loss", "inf")
    assert _cause(inspector, 3).evidence["operator"].startswith("a logarithm of zero")
    assert not any("broke off" in note for note in inspector.session().notes)


@pytest.mark.parametrize("ends", ["the loop's function", "the step's function", "the step's function, then raises"])
def test_a_loss_of_a_function_that_returns_without_a_backward_is_found(ends: str) -> None:
    model = _network()
    optimizer = sgd(model)

    def step(number: int) -> bool:
        loss = ((model(torch.ones(3, 4)) * 0 + float(number != 3)).log()).mean()
        if not math.isfinite(loss.item()):
            return False
        take_step(optimizer, loss)
        return True

    def train() -> None:
        for number in range(5):
            loss = ((model(torch.ones(3, 4)) * 0 + float(number != 3)).log()).mean()
            if not math.isfinite(loss.item()):
                return
            take_step(optimizer, loss)

    with contextlib.suppress(ValueError), Inspector(model, optimizers=optimizer) as inspector:
        if ends == "the loop's function":
            train()
        for number in range(0 if ends == "the loop's function" else 5):
            if not step(number) and "raises" in ends:
                raise ValueError("a step has failed")
    (event,) = inspector.session().events
    assert (event.step, event.phase, event.what, event.value) == (3, "forward", "loss", "inf")
    assert _cause(inspector, 3).evidence["operator"].startswith("a logarithm of zero")


def test_a_functions_variables_are_kept_only_until_the_backward_or_the_next_forward() -> None:
    model = _network()
    optimizer = sgd(model)

    class Batch:
        """A variable of the loop."""

    kept: list[weakref.ref[Batch]] = []

    def step(has_backward: bool) -> None:
        batch = Batch()
        kept.append(weakref.ref(batch))
        loss = model(torch.ones(3, 4)).mean()
        if has_backward:
            take_step(optimizer, loss)

    with Inspector(model, optimizers=optimizer):
        step(has_backward=True)
        assert kept[0]() is None
        step(has_backward=False)
        assert kept[1]() is not None
        step(has_backward=True)
        assert kept[1]() is kept[2]() is None
        step(has_backward=False)
    assert kept[3]() is None


def test_a_loss_of_gradients_that_the_loop_leaves_out_is_found() -> None:
    """Forces are an energy's gradients: their own backward has run, the loss's has not."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = sgd(model)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(6):
            place = torch.ones(3, 4) * (0.0 if step in (2, 3) else 1.0)
            place.requires_grad_()
            energy = model(place.square().sqrt()).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
            loss = force.square().mean()
            if loss.isfinite():
                take_step(optimizer, loss)
    (event,) = inspector.session().events
    assert (event.step, event.what, event.value) == (2, "loss", "nan")
    assert _operators(inspector)[0].startswith("a square root of zero")


def test_a_loss_in_the_first_step_is_found_without_any_backward() -> None:
    inspector = _left_out("raises", broken_at=0)
    assert [event.step for event in inspector.session().events] == [0]
    assert not inspector.report().verdict.healthy


def test_finite_losses_and_those_of_other_models_are_no_events() -> None:
    model, other = _network(), _network()
    optimizer = sgd(model)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(3):
            beside = other(torch.ones(3, 4)).mean() * math.inf
            take_step(optimizer, model(torch.ones(3, 4)).mean() + model(torch.zeros(3, 4)).mean())
        kept = model(torch.ones(3, 4)).mean()
    assert kept.isfinite()
    assert not beside.isfinite()
    assert inspector.session().events == ()


# -- weights at the end -------------------------------------------------------------------------------------------------


def test_weights_that_broke_without_a_watch_are_an_error(tmp_path: Path) -> None:
    inspector = _trained(broken_at=4, watch=False, every=100, log_dir=tmp_path / "run")
    (event,) = inspector.session().events
    assert (event.phase, event.step, event.what, event.tensor, event.value) == ("end", 5, "weight", "0.weight", "nan")
    assert event.explanation == "4 of 4 parameters are not finite"
    assert Session.load(tmp_path / "run").events == (event,)
    finding = _the_finding(inspector)
    assert finding.severity == "error"
    assert "When the run ended '0.weight' held a NaN; 4 of 4 parameters are not finite." in finding.message
    assert "the watch was off" in finding.message
    assert "watch at every step" in finding.fix
    broke = what_broke(inspector.report())
    assert broke is not None
    assert first_line(broke) == "end of the run (step 5), '0.weight', first NaN"
    text = str(inspector.report())
    assert "first: step 5, end, '0' (Linear): nan in the weight of '0.weight'\n  no step reported it\n" in text


def test_weights_that_broke_in_a_step_unwatched_under_a_budget_are_an_error() -> None:
    model = _network()

    def breaks(step: int) -> None:
        if step == 4:
            model[2].bias.fill_(math.inf)

    inspector = _trained(5, model=model, max_overhead=0.02, after_step=breaks)
    finding = _the_finding(inspector)
    assert "'2.bias' held an inf; 1 of 4 parameters are not finite" in finding.message
    watched = f"the watch checked {inspector.session().progress.watched_steps} of 5 steps, since its time was limited"
    assert watched in finding.message


def test_weights_broken_by_the_learning_rate_are_reported() -> None:
    model = _network()
    # Near FP32's maximum; the gradients are larger than 1.
    inspector = inspected(model, lambda step: model(torch.ones(3, 4)).square().mean() * 1000, 1, lr=3e38)
    finding = _the_finding(inspector)
    assert "every value that the watch read in the steps taken was finite" in finding.message
    assert "learning rate" in finding.fix


def test_weights_that_broke_with_finite_gradients_are_reported_with_other_infinities() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def breaks(step: int) -> None:
        if step == 0:
            model[0].weight[0, 0] = math.inf

    # tanh of an infinity is 1, and its gradient is zero.
    inspector = _trained(3, model=model, after_step=breaks)
    seen = "in the steps taken was finite, except in step 1, where the activation of '0' (Linear) held an inf"
    assert [seen in each.message for each in inspector.report().findings if each.severity == "error"] == [True]


def test_broken_weights_are_not_reported_again_after_an_event_of_a_step() -> None:
    told = [(event.phase, event.what) for event in _trained(broken_at=4).session().events]
    assert told == [("forward", "loss"), ("forward", "activation")]


def test_broken_weights_are_reported_after_a_harmless_event() -> None:
    model = _network()

    def breaks(step: int) -> None:
        if step == 1:
            model[2].bias.fill_(math.nan)

    options = {"broken_at": 0, "broken": lambda loss: loss * math.inf, "scaler": cpu_scaler(2.0)}
    events = _trained(2, model=model, after_step=breaks, **options).session().events
    assert (events[0].skipped, events[-1].phase, events[-1].tensor) == (True, "end", "2.bias")


def test_finite_weights_and_frozen_weights_are_not_an_event() -> None:
    model = _network()
    with torch.no_grad():
        model[0].bias.fill_(-math.inf)
    model[0].bias.requires_grad_(False)
    assert _trained(model=model, watch=False).session().events == ()
    assert _trained(watch=False).session().events == ()
    with Inspector(_network(), watch=False) as inspector:
        pass
    assert inspector.session().events == ()


def test_weights_infinite_from_the_start_or_uninitialized_are_not_an_event() -> None:
    model = Of(
        lambda self, x: self.layer(x),
        layer=nn.Linear(4, 1),
        never_called=nn.LazyLinear(3),
        mask=nn.Parameter(torch.full((4,), -math.inf)),
    )
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, watch=False) as inspector:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert inspector.session().events == ()
    assert not any("failed" in note for note in inspector.session().notes)


def test_a_sparse_parameter_is_not_an_event() -> None:
    model = nn.Linear(2, 1)
    model.register_parameter("first", nn.Parameter(torch.eye(3).to_sparse()))
    model._parameters = {name: model._parameters[name] for name in ("first", "weight", "bias")}
    with Inspector(model, watch=False) as inspector:
        model(torch.ones(1, 2)).sum().backward()
    assert inspector.session().events == ()


def test_a_second_detach_finishes_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = Inspector(_network()).attach()

    def interrupted(wait: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inspector._capture, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            inspector.detach()
    assert not inspector.session().progress.ended
    inspector.detach()
    assert inspector.session().progress.ended


def test_weights_restored_between_two_trainings_are_not_an_event(tmp_path: Path) -> None:
    launched.write(
        tmp_path,
        """
import copy, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def train(breaks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    if breaks:
        model[0].weight.data.fill_(float("nan"))
sound = copy.deepcopy(model.state_dict())
train(True)
model.load_state_dict(sound)
train(sys.argv[1] == "broken")
""",
    )
    ended = launched.run(tmp_path, (*launched.MPINSPECT, "train.py", "sound"), forked=True)
    assert ended.status == 0
    assert "non-finite-event" not in ended.err
    ended = launched.run(tmp_path, (*launched.MPINSPECT, "train.py", "broken"), forked=True)
    assert "\nend of the run (step 5), '0.weight', first NaN\n" in ended.err


# -- the loss ------------------------------------------------------------------------------------------------------------


def test_a_nan_in_the_loss_is_attributed_to_the_loss() -> None:
    inspector = _trained(broken_at=4)
    event = inspector.session().events[0]
    assert (event.module, event.after, event.place) == ("", False, "the loss")
    assert first_line(event) == "step 4, forward, the loss, first NaN"
    finding = next(each for each in _unexplained(inspector) if "forward" in each.message)
    assert "the loss held a NaN (every output seen was finite and the loss was not" in finding.message
    assert "Look at the loss function, and at the targets of step 4" in finding.fix


def _ctc(step: int, output: torch.Tensor) -> torch.Tensor:
    """Return a CTC loss of two samples of 8 frames; in every fifth step the second has 9 labels."""
    log_probabilities = output.float().view(2, 8, 3).log_softmax(-1).transpose(0, 1)
    lengths = torch.tensor([2, 9 if step % 5 == 3 else 3])
    labels = torch.tensor([[1, 2] * 5] * 2)[:, :9]
    return nn.functional.ctc_loss(log_probabilities, labels, torch.tensor([8, 8]), lengths)


def _dice(step: int, output: torch.Tensor) -> torch.Tensor:
    """Return a Dice loss in FP16, with sums above 65504 from step 3."""
    p = output.sigmoid().repeat(4000 if step >= 3 else 1, 1)
    return 1 - (2 * (p * 0.5).sum() + 1) / (p.sum() + 1)


def _likelihood(step: int, output: torch.Tensor) -> torch.Tensor:
    return -output.float().sigmoid().log().mean()


def _scaled(
    loss_of: Callable[[int, torch.Tensor], torch.Tensor], large: Callable[[int], bool] = lambda step: False
) -> Inspector:
    """Train under FP16 autocast with a scaler; in ``large`` steps the first layer's output overflows to -inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[2].weight.fill_(0.1)

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            output = model(torch.full((16, 4), 6e4) if large(step) else torch.randn(16, 4))
            return loss_of(step, output)

    return inspected(model, loss, 16, lr=1e-3, scaler=cpu_scaler(16.0))


def test_a_loss_that_its_targets_make_infinite_is_not_an_overflow_of_fp16() -> None:
    inspector = _scaled(_ctc)
    session, report = inspector.session(), inspector.report()
    assert {(event.what, event.dtype) for event in session.events} == {("loss", "float32")}
    broken = next(each for each in recorded(session.measurements, BrokenLoss) if each.step == 3)
    assert (broken.names, broken.text, broken.in_half) == (("CtcLoss",), "float32", False)
    cause, others = _cause(inspector, 3), report.findings[1:]
    assert cause.evidence["operator"] == "a CTC loss of a target longer than its input"
    assert cause.evidence["rows"] == ["1"]
    assert {finding.severity for finding in others} == {"info"}
    assert "65504" not in str(report)
    (event,) = (finding for finding in others if finding.id == "non-finite-event")
    assert "3 steps: first in step 3 and then every 5 steps" in event.message
    unexplained = dataclasses.replace(session, measurements=(broken.measurement(),))
    fallen = next(each for each in analyse(unexplained).findings if each.id == "non-finite-event")
    assert "(autograd's CtcLoss, in FP32)" in fallen.message
    place = "the loss function (autograd's CtcLoss, in FP32), and at the targets of step 3."
    assert fallen.fix.startswith(f"Look at {place}")
    assert "65504" not in fallen.fix + fallen.code


def test_a_ctc_loss_of_impossible_labels_is_not_attributed_to_long_targets() -> None:
    model, lengths = nn.Linear(4, 3), (torch.tensor([8, 8]), torch.tensor([2, 2]))

    def loss(step: int) -> torch.Tensor:
        scores = model(torch.ones(8, 2, 4)).log_softmax(-1).masked_fill(torch.tensor([False, True, False]), -math.inf)
        return nn.functional.ctc_loss(scores, torch.tensor([[1, 2], [1, 2]]), *lengths)

    session = inspected(model, loss, 1).session()
    assert next(recorded(session.measurements, BrokenLoss)).names == ("CtcLoss",)
    assert not any("CTC" in each.text for each in session.measurements)


def test_a_loss_that_overflows_in_fp16_is_named_in_the_fix() -> None:
    fallen = _scaled(_dice).report().findings[0]
    assert (fallen.id, fallen.step, fallen.layer) == ("non-finite-event", 3, "")
    assert "the loss function (autograd's Div of Sum of" in fallen.fix
    assert "the model" not in fallen.fix


def test_a_logarithm_of_an_overflowed_value_is_not_a_cause() -> None:
    inspector = _scaled(_likelihood, lambda step: step >= 3)
    cause = inspector.report().findings[0]
    assert cause.layer == "0"
    assert cause.evidence["operator"] == "a matrix product beyond FP16's largest number, 65504"
    # A model on a GPU may have left nothing to examine.
    session = dataclasses.replace(inspector.session(), measurements=())
    fallen = analyse(session).findings[0]
    assert (fallen.id, fallen.layer) == ("non-finite-event", "0")
    assert "65504" in fallen.fix
    # In FP32 the maximum is not 65504.
    events = [dataclasses.replace(event, dtype="float32") for event in session.events]
    fallen = analyse(dataclasses.replace(session, events=tuple(events))).findings[0]
    assert (fallen.id, "65504" in fallen.fix + fallen.code) == ("non-finite-event", False)


def _mask() -> torch.Tensor:
    """Return a mask of the last columns of row 2."""
    mask = torch.zeros(5, 6, dtype=torch.bool)
    mask[2, 4:] = True
    return mask


@pytest.mark.parametrize("operator", ["division", "product"])
def test_a_parameter_multiplied_by_a_masks_infinity_is_named(operator: str) -> None:
    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x).masked_fill(mask, -math.inf)
        return scores / self.temperature if operator == "division" else self.temperature * scores

    model = Of(forward, layer=nn.Linear(4, 6), temperature=nn.Parameter(torch.tensor(0.5)))

    def loss(step: int) -> torch.Tensor:
        scores = model(torch.randn(5, 4), _mask() if step >= 2 else torch.zeros(5, 6, dtype=torch.bool))
        return nn.functional.cross_entropy(scores, torch.zeros(5, dtype=torch.long))

    inspector = inspected(model, loss, 4)
    cause = _cause(inspector, 2)
    assert cause.evidence["operator"].startswith(f"a {operator} of an infinity")
    assert cause.evidence["operator"].endswith("the parameter 'temperature'")
    assert cause.evidence["rows"] == ["2"]
    assert {finding.severity for finding in inspector.report().findings[1:]} == {"info"}


def test_a_masks_infinity_without_a_non_finite_gradient_is_not_a_cause() -> None:
    model = nn.Linear(4, 6)

    def loss(step: int) -> torch.Tensor:
        scores = model(torch.randn(5, 4)).masked_fill(_mask(), -math.inf) / 0.5
        return nn.functional.cross_entropy(scores, torch.zeros(5, dtype=torch.long))

    assert inspected(model, loss, 3).report().verdict.healthy


def test_an_infinity_that_an_exponential_makes_is_not_taken_for_a_masks() -> None:
    """It is divided by its sum: the NaN is of another class than the target, so that the loss is finite."""
    model = nn.Linear(4, 6)
    nn.init.constant_(model.bias, 1.0)

    def loss(step: int) -> torch.Tensor:
        factors = torch.tensor([1.0, 1, 1, 1, 1, 400.0 if step == 2 else 1.0])
        weights = (model(torch.rand(5, 4)) * factors).half().exp()
        shares = (weights / weights.sum(-1, keepdim=True)).float()
        return -(shares[:, :2] + 1e-6).log().mean()

    assert _cause(inspected(model, loss, 4), 2).evidence["operator"].startswith("exp of a number too large")


def _product_under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return x @ x.t()


#: For each operation, what breaks in FP16 for a large x, in the graph of a loss, and the words for it.
BEYOND: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "product": (lambda x: x.half() * x.half(), "a product"),
    "product with a number": (lambda x: (x.half() * x.half()) * 2.0, "a product"),
    "square": (lambda x: x.half() ** 2, "a power of 2"),
    "quotient": (lambda x: x.half() / torch.full((4,), 2.0**-12).half(), "a division"),
    "sum of products": (lambda x: (x.half() * torch.full((4,), 100.0).half()).sum(-1), "a sum"),
    "sum of all": (lambda x: (x.half() * torch.full((4,), 100.0).half()).sum(), "a sum"),
    "matrix product": (lambda x: x.half() @ x.half().t(), "a matrix product"),
    "matrix product under autocast": (_product_under_autocast, "a matrix product"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_result_beyond_fp16_is_found_in_the_graph_of_a_loss_that_the_loop_raises_on(name: str) -> None:
    function, words = BEYOND[name]
    model = _passing_on()
    optimizer = sgd(model, 1e-6)
    with contextlib.suppress(ValueError), Inspector(model, optimizers=optimizer) as inspector:
        for step in range(4):
            # 200 * 100 * 4 and 300^2 exceed 65504, 200 * 100 does not.
            x = torch.full((3, 4), 1.0 if step < 3 else 200.0 if "sum" in name else 300.0)
            loss = function(model(x)).float().mean()
            if not loss.isfinite():
                raise ValueError("not finite")
            take_step(optimizer, loss)
    assert _cause(inspector, 3).evidence["operator"] == f"{words} beyond FP16's largest number, 65504"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("base", "exponent", "is_found"), [(20.0, 30.0, True), (20.0, 10.0, False), (math.inf, 2.0, False)]
)
def test_a_power_beyond_its_own_format_is_found(
    base: float, exponent: float, is_found: bool, dtype: torch.dtype
) -> None:
    model = _passing_on()

    def loss(step: int) -> torch.Tensor:
        y = model(torch.ones(3, 4)).to(dtype)
        counts = torch.full((3, 4), exponent if step == 3 else 2.0, dtype=dtype)
        return ((y * (base if step == 3 else 1.0)) ** counts).float().mean()

    findings = inspected(model, loss, 4, lr=1e-6).report().findings
    powers = [each for each in findings if "a power of numbers too large" in str(each.evidence.get("operator"))]
    assert [(each.id, each.step) for each in powers] == [("argument-out-of-range", 3)] * is_found
    if is_found:
        assert "k * x" in powers[0].code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_infinite_operands_are_not_taken_for_a_product_beyond_fp16(dtype: torch.dtype) -> None:
    model = _passing_on()
    optimizer = sgd(model, 1e-6)
    with contextlib.suppress(ValueError), Inspector(model, optimizers=optimizer) as inspector:
        take_step(optimizer, model(torch.ones(3, 4)).mean())
        y = model(torch.full((3, 4), math.inf)).to(dtype)
        loss = (y * y).float().mean()
        raise ValueError(f"loss {loss}")
    assert not any("beyond" in operator for operator in _operators(inspector))


@pytest.mark.parametrize("operation", ["matrix product", "division"])
def test_a_constant_that_is_not_finite_is_found(operation: str) -> None:
    model = _passing_on()

    def loss(step: int) -> torch.Tensor:
        degrees = torch.tensor([1.0, 2.0, 1.0, 0.0 if step == 2 else 1.0])
        y = model(torch.ones(4, 4))
        matrix = operation == "matrix product"
        return (torch.diag(degrees**-0.5) @ y if matrix else y / (degrees**-0.5 * 0 + 1)).mean()

    operator = _cause(inspected(model, loss, 4, lr=1e-6), 2).evidence["operator"]
    assert operator.startswith(f"a {operation}")
    assert "a constant that is infinite or NaN" in operator


def _divergence(log_p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (target * (target.log() - log_p)).sum()


ADDED = {
    "a logarithm of zero in the targets": (_divergence, "a difference"),
    "an infinite offset": (lambda y, target: (y + target.log()).sum(), "a sum"),
    # Either may be the one.
    "two offsets": (lambda y, target: (y + target.log() + target.sqrt()).sum(), ""),
    # FP16 may have overflowed.
    "FP16": (lambda y, target: (y.half() + target.log().half()).float().sum(), ""),
}


@pytest.mark.parametrize("name", ADDED)
def test_the_only_constant_of_sums_is_found_by_elimination(name: str) -> None:
    function, words = ADDED[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(-1))
    optimizer = sgd(model, 1e-6)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(4):
            target = torch.tensor([0.5, 0.2, 0.3, 0.0 if step == 2 else 0.1])
            loss = function(model(torch.ones(3, 4)), 1 / target if "offset" in name else target)
            if loss.isfinite():
                take_step(optimizer, loss)
    cause = inspector.report().findings[0]
    assert cause.step == 2
    found = cause.evidence.get("operator", "")
    assert found == (words and f"{words} with a constant that is infinite or NaN")


@pytest.mark.parametrize("broken", ["batch beyond FP16", "NaN"])
def test_a_batch_whose_cast_to_fp16_is_infinite_is_not_taken_for_a_constant(broken: str) -> None:
    model = _passing_on()

    def loss(step: int) -> torch.Tensor:
        factor = {"batch beyond FP16": 1e6, "NaN": math.nan}[broken] if step == 2 else 1.0
        with torch.autocast("cpu", torch.float16):
            matrix = torch.ones(4, 4) * factor
            return (model(torch.ones(4, 4)) - 1 + matrix @ model(torch.ones(4, 4))).float().mean()

    operators = _operators(inspected(model, loss, 4, lr=1e-6))
    assert any("a constant" in operator for operator in operators) is (broken == "NaN")


def test_the_operator_nearest_to_fp16s_end_is_named_beside_a_constant_that_is_not_finite() -> None:
    model = _passing_on()

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            target = torch.full((3, 4), 4000.0 if step == 4 else 100.0).half() * 20.0
        return (model(torch.ones(3, 4)) / target).mean() + (model(torch.ones(3, 4)) * target).mean()

    cause = _cause(inspected(model, loss, 6, lr=1e-6, second=True), 4)
    assert "mul (test_ended_badly.py" in cause.message
    assert "2e+03 of 65504" in cause.message


def test_the_loss_of_a_compiled_model_is_examined() -> None:
    model = torch.compile(_network(), backend="eager")
    inspector = inspected(model, lambda step: (model(torch.ones(3, 4)) * 0 + (step != 2)).log().mean(), 4)
    event = inspector.session().events[0]
    assert (event.step, event.what) == (2, "loss")
    assert _cause(inspector, 2)


def test_a_run_of_infinite_losses_alone_names_the_loss() -> None:
    model = _network()
    inspector = inspected(model, lambda _: model(torch.ones(3, 4)).mean() * math.inf, 3, scaler=cpu_scaler(65536.0))
    finding = _the_finding(inspector)
    first = "first in step 0, where the loss held an inf"
    assert f"The forward was not finite in each of the 3 steps: {first}" in finding.message
    assert "autograd's Mean, in FP32" in finding.message
    with Inspector(model) as inspector:
        for _ in range(3):
            assert not (model(torch.ones(3, 4)).mean() * math.inf).isfinite()
    report = inspector.report()
    assert report.verdict.sentences == ("Health unknown: no backward was seen.",)
    assert "skipping every non-finite loss" in report.loss_scale.reason


def test_a_non_finite_gradient_of_the_loss_is_placed_after_the_last_module() -> None:
    inspector = _trained(broken_at=4, broken=_of_infinite_slope)
    event = inspector.session().events[0]
    assert (event.module, event.after, event.place) == ("2", True, "the code after '2' (Linear)")
    assert first_line(event) == "step 4, backward, the code after '2' (Linear), first NaN, outputs finite"
    finding = next(each for each in _unexplained(inspector) if "backward" in each.message)
    assert "the gradient that arrived at the output of '2' (Linear) held a NaN already" in finding.message
    assert "the code after '2' (Linear), first at the loss" in finding.fix
    assert "GradScaler would skip such steps, but not remove their cause" in finding.fix


def test_a_non_finite_gradient_inside_a_module_is_not_placed_after_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Of(lambda self, x: x.sub(x).abs().sqrt()), nn.Linear(2, 1))
    inspector = inspected(model, lambda step: model(torch.ones(3, 2)).sum(), 1)
    event = inspector.session().events[0]
    assert (event.phase, event.module, event.after) == ("backward", "1", False)
    (finding,) = (each for each in _unexplained(inspector) if each.id == "non-finite-event")
    assert "the backward of '1'" in finding.fix
    assert _cause(inspector, 0, layer="1")


def _unexplained(inspector: Inspector) -> tuple[Finding, ...]:
    """Return the findings of a session without its measurements, which name causes."""
    return analyse(dataclasses.replace(inspector.session(), measurements=())).findings


def _raises(where: str) -> Inspector:
    model = _network()
    optimizer = sgd(model)
    inspector = Inspector(model, optimizers=optimizer)
    with pytest.raises(FloatingPointError), inspector:  # noqa: PT012 - the test chooses where it is raised
        for step in range(3):
            optimizer.zero_grad()
            output = model(torch.full((3, 4), math.inf if where == "forward" and step == 2 else 1.0))
            if step == 2 and where in ("loss", "forward"):
                raise FloatingPointError("loss is NaN")
            output.square().mean().backward()
            if step == 2 and where == "backward":
                raise FloatingPointError("gradient is NaN")
            optimizer.step()
        raise FloatingPointError("between steps")
    return inspector


def test_an_exception_between_forward_and_backward_may_concern_the_loss() -> None:
    (note,) = (note for note in _raises("loss").session().notes if "broke off" in note)
    assert note.startswith("FloatingPointError broke off step 2 after its forward, whose last output was finite")
    assert "in the loss function" in note


def test_an_exception_inside_a_forward_does_not_concern_the_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(RuntimeError), Inspector(model) as inspector:
        model(torch.ones(2, 4))
    assert not any("broke off" in note for note in inspector.session().notes)


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_an_exception_elsewhere_does_not_concern_the_loss(where: str) -> None:
    assert not any("broke off" in note for note in _raises(where).session().notes)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad")


def _crashed(where: str, at: int = 1, error: BaseException | None = None) -> Inspector:
    """Train until an exception at the place ``where`` of the step ``at``."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))
    optimizer = sgd(model)
    inspector = Inspector(model, optimizers=optimizer)
    with pytest.raises(BaseException), inspector:  # noqa: B017, PT011, PT012 - error and place are parameters
        for step in range(3):
            now = where if step == at else ""
            if now == "data":
                raise error or ValueError("bad")
            optimizer.zero_grad()
            output = model(torch.ones(3, 5 if now == "forward" else 4))
            loss = nn.functional.cross_entropy(output, torch.tensor([0, 1, 7 if now == "targets" else 2]))
            (_RaisesInBackward.apply(loss) if now == "backward" else loss).backward()
            if now == "clipping":
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
            optimizer.param_groups[0]["lr"] = "fast" if now == "optimizer" else 0.1
            optimizer.step()
    return inspector


@pytest.mark.parametrize(
    ("where", "phase", "module", "begins"),
    [
        ("data", "between-steps", "", "after step 0: ValueError: bad"),
        ("forward", "forward", "0", "after step 0, in the forward of '0' (Linear): RuntimeError: "),
        ("targets", "after-forward", "", "in step 1, after the forward and before the backward: IndexError: Target 7"),
        ("backward", "backward", "", "in step 1, in the backward: ValueError: bad"),
        (
            *("clipping", "after-backward", ""),
            "in step 1, after the backward and before the optimizer's step: OutOfMemoryError: ",
        ),
        ("optimizer", "optimizer", "", "in step 1, in the optimizer's step: TypeError: "),
    ],
)
def test_a_run_that_ended_with_an_exception_is_not_healthy(where: str, phase: str, module: str, begins: str) -> None:
    inspector = _crashed(where)
    error = inspector.session().ended_by
    assert error is not None
    assert (error.step, error.names, error.name) == (1, (phase,), module)
    report = inspector.report()
    assert (report.verdict.healthy, report.findings) == (None, ())
    first, *more = report.verdict.lines
    assert first.startswith(f"Ended by an exception {begins}")
    began = "No finding explains it: start from its traceback. No numerical problem was found in 1 step before it."
    assert any(line.startswith(began) for line in more)
    assert first in " ".join(str(report).split())
    assert "broke off" not in str(report)


def test_the_report_names_an_exception_before_the_first_backward() -> None:
    report = _crashed("data", at=0).report()
    assert report.verdict.lines[0] == "Ended by an exception before the first step: ValueError: bad"
    assert report.verdict.healthy is None
    assert "run forward" not in str(report)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), SystemExit()])
def test_an_interrupt_or_a_successful_exit_is_not_a_failure(error: BaseException) -> None:
    inspector = _crashed("data", error=error)
    assert inspector.session().ended_by is None
    assert inspector.report().verdict.healthy


def test_an_exit_with_another_status_is_a_failure() -> None:
    assert _crashed("data", error=SystemExit(3)).report().verdict.ended.startswith("Ended by sys.exit(3) ")


@pytest.mark.parametrize(("steps", "words"), [(1, "skipped the only step. First: step 0"), (2, "skipped all 2 steps")])
def test_a_run_with_every_step_skipped_names_the_first_overflow(steps: int, words: str) -> None:
    model = _network()
    loss = lambda step: model(torch.ones(3, 4)).square().mean() * 4  # noqa: E731
    verdict = inspected(model, loss, steps, scaler=cpu_scaler(2.0**127)).report().verdict
    assert verdict.healthy is None
    assert words in str(verdict)
    assert "the loss scale is still too high" in str(verdict)


def test_a_run_without_captured_tensors_is_not_called_healthy() -> None:
    verdict = _trained(include="nothing.*").report().verdict
    assert verdict.healthy is None
    assert "no tensor was selected for counting" in str(verdict)
    assert _trained(capture=()).report().verdict.healthy


def test_the_verdict_has_both_the_exception_and_the_trouble() -> None:
    session = dataclasses.replace(_trained(broken_at=4).session(), measurements=_crashed("data").session().measurements)
    verdict = analyse(session).verdict
    assert (verdict.healthy, verdict.opening) == (False, "Error")
    assert verdict.lines[0].startswith("Ended by an exception after step 0")


def test_the_exception_that_ends_a_process_is_recorded_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _network()
    inspector = Inspector(model, log_dir=tmp_path / "run").attach()
    model(torch.ones(3, 4)).sum().backward()
    monkeypatch.setattr(sys, "last_value", ValueError("bad"), raising=False)
    assert inspector._at_exit is not None
    inspector._at_exit()
    error = Session.load(tmp_path / "run").ended_by
    assert error is not None
    assert (error.text, error.names) == ("ValueError: bad", ("after-backward",))


@pytest.mark.parametrize("message", ["Target 7 is out of bounds.", "information is missing"])
def test_an_exception_that_names_no_value_does_not_concern_the_loss(message: str) -> None:
    model = _network()
    with pytest.raises(ValueError, match=message), Inspector(model) as inspector:  # noqa: PT012
        model(torch.ones(3, 4))
        raise ValueError(message)
    assert not any("broke off" in note for note in inspector.session().notes)


def test_a_scripts_exception_is_reported_before_the_precision(tmp_path: Path) -> None:
    launched.write(
        tmp_path,
        """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for step in range(5):
        loss = model(torch.ones(3, 2)).sum()
        if step == 3:
            raise FloatingPointError("loss is NaN")
        loss.backward()
        optimizer.step()
train()
""",
    )
    ended = launched.run(tmp_path, (*launched.MPINSPECT, "--full", "train.py"), forked=True)
    assert ended.status == 1
    said = " ".join(ended.err.split())
    assert "FloatingPointError broke off step 3 after its forward" in said
    what = "Ended by an exception in step 3, after the forward and before the backward: FloatingPointError: loss is NaN"
    assert said.index(what) < said.index("Computes in FP32")
    assert "Healthy" not in said


# -- updates and scales -----------------------------------------------------------------------------------------------


def test_a_forward_overflow_due_to_large_weights_is_reported_with_their_maximum() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def enlarges(step: int) -> None:
        if step == 1:
            model[0].weight.fill_(1e28)

    inspector = inspected(model, lambda step: model(torch.full((3, 4), 1e20)).sum(), 3, lr=0.0, after_step=enlarges)
    (event,) = inspector.session().events
    assert (event.step, event.phase, event.module) == (2, "forward", "0")
    assert "'0.weight' itself reaches 1e+28" in event.explanation


@pytest.mark.parametrize(("begins", "severity"), [(2.0**20, "info"), (2.0**100, "warning")])
def test_a_scale_that_takes_dozens_of_steps_to_fall_is_a_warning(begins: float, severity: str) -> None:
    model = _network()
    # The loss is about 2^115, so scales above about 2^13 overflow FP32.
    loss = lambda step: model(torch.ones(3, 4)).mean() * 2.0**115  # noqa: E731
    inspector = inspected(model, loss, 60, lr=0.0, scaler=cpu_scaler(begins))
    assert inspector.session().progress.skipped_steps > 0
    assert _the_finding(inspector).severity == severity


@pytest.mark.parametrize(
    ("steps", "compiled", "basis"),
    [
        (4, False, "(by 4 steps alone)"),
        (6, True, "(by weight gradients alone)"),
        (1, True, "(by 1 step alone and weight gradients alone)"),
        (6, False, ""),
    ],
)
def test_a_window_with_little_evidence_says_so(steps: int, compiled: bool, basis: str) -> None:
    session = _trained(steps).session()
    if compiled:
        windows = tuple(
            dataclasses.replace(window, tensors={key: of for key, of in window.tensors.items() if "weight" in key.kind})
            for window in session.windows
        )
        session = dataclasses.replace(session, windows=windows)
    verdict = str(analyse(session).verdict)
    assert basis in verdict
    assert ("(by" in verdict) is bool(basis)


# -- refused by the scaler ----------------------------------------------------------------------------------------------


REFUSED = """
import torch

class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())

model = Tower().half()
model.body.requires_grad_(False)
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    loss = model(torch.ones(3, 4).half()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def _report_of_failed(script: str, directory: Path) -> RangeReport:
    """Run a script that fails; return the report of its session."""
    launched.write(directory, script)
    command = (sys.executable, "-m", "mpinspect", "run", "--log-dir", "run", "train.py")
    assert launched.run(directory, command, forked=True).status == 1
    return analyse(Session.load(next((directory / "run").glob("**/session.mpinspect"))))


def test_float16_gradients_that_a_scaler_refuses_are_named(tmp_path: Path) -> None:
    findings = _report_of_failed(REFUSED, tmp_path).findings
    finding = next(each for each in findings if each.id == "gradients-refused")
    assert finding.severity == "error"
    assert "The gradients of 'head.weight', 'head.bias' are in FP16." in finding.message
    assert "p.data = p.data.float()" in finding.code


LOOP = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
idle = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    loss = model(torch.ones(3, 4)).square().mean()
    {}
"""
SCALED, STEP, UNSCALE = "scaler.scale(loss).backward(); ", "scaler.step(optimizer)", "scaler.unscale_(optimizer)"


@pytest.mark.parametrize(
    ("calls", "says", "code"),
    [
        (SCALED + "scaler.update()", "before any scaler.step()", "scaler.update()"),
        (
            *(SCALED + "scaler.step(idle); scaler.update()", "holds no parameter with a gradient"),
            "for group in optimizer.param_groups:",
        ),
        (f"{SCALED}{UNSCALE}; {UNSCALE}", "called twice", UNSCALE),
        (f"{SCALED}{STEP}; {UNSCALE}", "came after scaler.step()", STEP),
        (f"{SCALED}{STEP}; {STEP}", "scaler.step() was called twice", "scaler.update()"),
        (f"loss.backward(); {STEP}", "no loss had been scaled", "scaler.scale(loss).backward()"),
    ],
)
def test_calls_that_a_scaler_refuses_are_named(calls: str, says: str, code: str, tmp_path: Path) -> None:
    report = _report_of_failed(LOOP.format(calls), tmp_path)
    finding = report.findings[0]
    assert (finding.id, finding.severity) == ("scaler-call-refused", "error")
    assert [each.id for each in report.findings if each.is_alarm] == ["scaler-call-refused"]
    assert says in finding.message
    assert code in finding.code.splitlines()
