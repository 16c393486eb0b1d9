"""Gradients that are exactly zero in all sampled steps: of a whole model, of its first layers, of a branch."""

import math
from collections.abc import Callable

import pytest
import torch
from agreeing_reports import contradictions
from models import Of
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from trainings import inspected

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.records import Saturated, recorded

ID = "gradients-all-zero"


def train(
    model: nn.Module, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor], steps: int = 12, lr: float = 0.01
) -> RangeReport:
    report = inspected(model, lambda _: loss_of(model, torch.randn(16, 8)), steps, lr=lr, optimizers=None).report()
    assert contradictions(report) == []
    return report


def mlp(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), *last)


def named(report: RangeReport):
    return [finding for finding in report.findings if finding.id == ID]


def saturating(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype):
    def loss_of(model, x):
        return function(model(x).to(dtype) + torch.tensor([40.0, -800, -800, -800]).to(dtype)).float().sum()

    return loss_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "name", "code"),
    [
        (torch.sigmoid, "sigmoid", "BCEWithLogitsLoss"),
        (torch.tanh, "tanh", "x.float()"),
        (lambda x: x.softmax(-1), "softmax", "CrossEntropyLoss"),
    ],
    ids=["sigmoid", "tanh", "softmax"],
)
def test_a_saturated_function_before_the_loss_is_named(function, name, code, dtype):
    report = train(mlp(), saturating(function, dtype))
    (finding,) = named(report)
    assert (finding.severity, finding.layer) == ("error", "")
    assert (finding.evidence["parameters"], finding.evidence["steps"]) == (4, 12)
    assert (finding.evidence["function"], finding.evidence["elements"]) == (name, 64)
    assert f"results of a {name} in " in finding.message
    assert code in finding.code
    assert report.verdict.healthy is False


def test_the_module_of_a_saturated_function_is_named():
    def loss_of(model, x):
        return nn.functional.binary_cross_entropy(model(x), torch.zeros(16, 4))

    model = mlp(nn.Sequential(nn.Sigmoid()))
    with torch.no_grad():
        model[2].bias.fill_(40.0)
    (finding,) = named(train(model, loss_of))
    assert finding.layer == "3.0"
    assert "results of a sigmoid in '3.0' (Sigmoid) in FP32 were exactly 0 or 1" in finding.message


def test_the_argument_from_which_a_sigmoid_rounds_to_1_is_that_of_bf16():
    (finding,) = named(train(mlp(), saturating(torch.sigmoid, torch.bfloat16)))
    edge = next(
        x / 100 for x in range(1, 1000) if torch.sigmoid(torch.tensor(x / 100, dtype=torch.float64)).bfloat16() == 1
    )
    assert math.isclose(edge, 9 * math.log(2), abs_tol=0.02)
    assert f"of about {edge:.1f} on" in finding.message
    (wide,) = named(train(mlp(), saturating(torch.sigmoid, torch.float32)))
    assert "rounds to 1" not in wide.message


def test_a_factor_of_zero_leaves_the_whole_model_without_a_gradient():
    (finding,) = named(train(mlp(), lambda model, x: (model(x) * 0).sum()))
    assert finding.severity == "error"
    assert "arrive at the output of '2' (Linear) are zero already" in finding.message
    assert "function" not in finding.evidence


@pytest.mark.parametrize("steps", [1, 4])
def test_a_few_steps_are_not_evidence(steps):
    assert named(train(mlp(), lambda model, x: (model(x) * 0).sum(), steps)) == []


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(torch.float8_e5m2).float()
        return grad @ weight, grad.t() @ x


class NarrowLinear(nn.Linear):
    def forward(self, x):
        return Narrow.apply(x, self.weight) + self.bias


@pytest.mark.parametrize(("factor", "is_told"), [(1e-9, True), (1.0, False)])
def test_a_backward_that_casts_to_fp8_without_a_scale_is_where_the_gradients_become_zero(factor, is_told):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), NarrowLinear(16, 4))
    found = named(train(model, lambda model, x: model(x).square().mean() * factor))
    assert bool(found) is is_told
    if is_told:
        (finding,) = found
        assert (finding.severity, finding.layer, finding.certainty) == ("warning", "0.weight", "inferred")
        assert finding.evidence["border"] == "2"


def residual(layer):
    """Two blocks beside a skip connection; ``layer`` makes the second layer of each."""
    torch.manual_seed(1)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), layer()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    return Of(forward, blocks=blocks, head=nn.Linear(8, 4))


def test_layers_amid_the_model_that_lose_their_gradients_are_a_warning():
    report = train(
        residual(lambda: NarrowLinear(8, 8)), lambda model, x: model(x).square().mean() * 1e-7, lr=1.0, steps=20
    )
    (finding,) = named(report)
    assert (finding.severity, finding.certainty) == ("warning", "inferred")
    # The weights that lose the gradient, and the layers before them, whose biases get none either.
    assert finding.evidence["names"] == [
        *(f"blocks.{block}.{name}" for block in (0, 1) for name in ("0.weight", "0.bias", "2.weight"))
    ]
    assert "arrive at the output of 'blocks.{0..1}.2'" in finding.message
    assert report.verdict.healthy is False


def test_one_layer_whose_input_is_zero_is_not_an_alarm():
    # A layer whose input is zero as long as no condition is given.
    gate = Of(lambda self, x: x + self.layer(torch.zeros_like(x)), layer=nn.Linear(8, 8))
    report = train(nn.Sequential(gate, nn.Linear(8, 4)), lambda model, x: model(x).square().mean(), steps=20)
    assert named(report) == []


def test_blocks_that_begin_at_zero_are_silent_in_the_first_step_alone():
    def zeros():
        layer = nn.Linear(8, 8)
        nn.init.zeros_(layer.weight)
        return layer

    assert named(train(residual(zeros), lambda model, x: (model(x) - 1).square().mean(), steps=20)) == []


def test_a_dead_relu_is_where_the_gradients_become_zero():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[2].bias, -100.0)
    (finding,) = named(train(model, lambda model, x: (model(x) - 3).square().mean()))
    assert finding.severity == "warning"
    assert finding.evidence["border"] == "4"
    assert "dead ReLU" in finding.message
    assert finding.code == ""


def gated():
    """A block whose gate begins at zero (ReZero), and a low-rank adapter whose second factor does (LoRA)."""
    adapter = {"down": nn.Linear(8, 2, bias=False), "up": nn.Linear(2, 8, bias=False)}
    nn.init.zeros_(adapter["up"].weight)
    forward = lambda self, x: x + self.gate * self.inner(x) + self.up(self.down(x))  # noqa: E731
    return Of(forward, inner=nn.Linear(8, 8), gate=nn.Parameter(torch.zeros(())), **adapter)


def test_weights_behind_a_zero_are_silent_in_the_first_step_alone():
    assert named(train(gated(), lambda model, x: (model(x) - x.flip(-1)).square().mean())) == []


def test_a_head_of_zeros_that_is_never_updated_is_not_a_finding():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    with Inspector(model) as inspector:
        for _ in range(12):
            model.zero_grad()
            (model(torch.randn(16, 8)) - 1).square().mean().backward()
    assert named(inspector.report()) == []


def test_the_micro_batches_of_a_first_step_are_one_step():
    model = gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(2):
            for _ in range(8):
                x = torch.randn(16, 8)
                (model(x) - x.flip(-1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # The gate and the adapter are put back, as by a schedule that has not begun.
            nn.init.zeros_(model.gate)
            nn.init.zeros_(model.up.weight)
    assert named(inspector.report()) == []


class Routed(nn.Module):
    """Experts; some get no sample, or a weight of zero."""

    def __init__(self, used: int, dense: bool):
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.used, self.dense = used, dense

    def forward(self, x):
        x = self.stem(x)
        weights = torch.zeros(3)
        weights[self.used] = 1.0
        if self.dense:
            return sum(weight * expert(x) for weight, expert in zip(weights, self.experts, strict=True))
        return sum(
            expert(x[: len(x) if number == self.used else 0]).sum(0) for number, expert in enumerate(self.experts)
        )


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("used", [0, 2])
def test_unused_experts_are_not_an_alarm(used, dense):
    report = train(Routed(used, dense), lambda model, x: (model(x) - 1).square().mean())
    assert all(finding.severity == "info" for finding in named(report))
    assert report.verdict.healthy is True


def test_a_recurrent_weight_without_a_past_is_not_an_alarm():
    # A recurrent cell that is called once, with a state of zeros: the state's weight has no gradient.
    model = Of(lambda self, x: self.head(self.cell(x)), cell=nn.RNNCell(8, 8), head=nn.Linear(8, 4))
    report = train(model, lambda model, x: model(x).square().mean())
    assert named(report) == []


def test_a_loss_multiplied_by_zero_is_information():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "main": nn.Linear(8, 4), "later": nn.Linear(8, 4)})

    def loss_of(model, x):
        x = model["body"](x).tanh()
        return model["main"](x).square().mean() + 0.0 * model["later"](x).square().mean()

    report = train(model, loss_of)
    (finding,) = named(report)
    assert (finding.severity, finding.layer) == ("info", "later.weight")
    assert report.verdict.healthy is True


def test_pruned_weights_and_unused_rows_are_not_a_finding():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))
    prune.random_unstructured(model[1], "weight", amount=0.9)
    report = train(model, lambda model, x: model(torch.randint(0, 5, (16,))).square().mean())
    assert named(report) == []


def test_partly_saturated_functions_are_not_recorded():
    model = mlp()
    with Inspector(model) as inspector:
        (model(torch.randn(16, 8)) + torch.tensor([40.0, 0, 0, 0])).sigmoid().sum().backward()
        (model(torch.randn(16, 8)) + 40.0).sigmoid().sum().backward()
    found = list(recorded(inspector.session().measurements, Saturated))
    assert [each.names for each in found] == [("sigmoid",)]


def test_a_checkpointed_function_is_not_computed_again_for_the_search():
    calls = []

    def function(x):
        calls.append(1)
        return (x + 40.0).sigmoid()

    model = mlp()
    with Inspector(model) as inspector:
        loss = checkpoint(function, model(torch.randn(16, 8)), use_reentrant=False).sum()
        loss.backward()
    assert len(calls) == 2
    assert list(recorded(inspector.session().measurements, Saturated)) == []
