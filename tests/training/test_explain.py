"""The culprit of a skipped step, in backward order, for any structure of the model; and the module of a broken forward."""

import copy
import io
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Of, Times
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import mixed_step

from mpinspect import LossScaler, MixedPrecision
from mpinspect.training import LossScaleWarning
from mpinspect.training.explain import ModelExplainer
from mpinspect.training.skipped_steps import NonFinite


def spoil(x: torch.Tensor, factor: float = math.inf) -> torch.Tensor:
    """Return x, whose gradient is multiplied by the factor."""
    return Times.apply(x, 1.0, factor)


def explain(
    model: nn.Module, loss: torch.Tensor, explainer: ModelExplainer | None = None, optimizer: Any = None
) -> NonFinite | None:
    """Return the culprit of one backward."""
    explainer = explainer or ModelExplainer(model)
    loss.backward()
    return explainer.gradient(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))


# -- gradients, in the order of the backward ----------------------------------------------------------------------------


class Backwards(nn.Module):
    """Runs its layers in reverse order of registration; the gradient breaks before the second to run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.broken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (3, 2, 1, 0):
            x = self.layers[number](x)
            if number == 2 and self.broken:
                x = spoil(x)
        return x


@pytest.mark.parametrize("order", [list, lambda parameters: list(reversed(parameters))])
def test_the_order_is_the_backwards_not_the_definitions(order):
    """The first broken layer in backward order is named, for a model that runs in reverse and for one that does not."""
    model = Backwards()
    culprit = explain(
        model, model(torch.ones(1, 2)).sum(), optimizer=torch.optim.SGD(order(list(model.parameters())), lr=0.1)
    )
    assert (culprit.layer, culprit.value) == ("layers.2", "inf")
    broken = {name for name, parameter in model.named_parameters() if not parameter.grad.isfinite().all()}
    assert {name.rpartition(".")[0] for name in broken} == {"layers.2", "layers.3"}

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    loss = layers[2](spoil(layers[:2](torch.ones(1, 2)))).sum()
    optimizer = torch.optim.SGD(order(list(layers.parameters())), lr=0.1)
    assert explain(layers, loss, optimizer=optimizer).layer == "1"


def test_finite_gradients_have_no_culprit():
    model = Backwards()
    model.broken = False
    explainer = ModelExplainer(model)
    assert explain(model, model(torch.ones(1, 2)).sum(), explainer) is None


def test_the_last_backward_counts():
    """A layer that broke in an earlier step, in another order, does not affect the result."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    explainer = ModelExplainer(model)
    model[0](spoil(model[1](torch.ones(1, 2)))).sum().backward()
    model.zero_grad()
    assert explain(model, spoil(model(torch.ones(1, 2))).sum(), explainer).layer == "1"


@pytest.mark.parametrize(("factor", "value"), [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "nan")])
def test_inf_and_nan_are_distinguished(factor, value):
    model = nn.Linear(2, 1, bias=False)
    assert explain(model, spoil(model(torch.ones(1, 2)), factor).sum()) == NonFinite("", "weight", value)


def test_tied_weights_have_their_first_name():
    layers = {"embedding": nn.Embedding(4, 4), "output": nn.Linear(4, 4, bias=False)}
    model = Of(lambda self, tokens: spoil(self.output(self.embedding(tokens))), **layers)
    model.output.weight = model.embedding.weight
    culprit = explain(model, model(torch.arange(4)).sum())
    assert (culprit.layer, culprit.name) == ("embedding", "embedding.weight")


def test_a_module_used_twice_is_named_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = model[1](model[0](spoil(model[0](torch.ones(1, 2)))))
    assert explain(model, x.sum()).layer == "0"


def test_frozen_parameters_are_passed_over():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    assert explain(model, model[2](spoil(model[1](model[0](torch.ones(1, 2))))).sum()).layer == "0"


def test_only_the_optimizers_own_parameters_are_searched():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert explain(model, spoil(model(torch.ones(1, 2))).sum(), optimizer=optimizer).layer == "0"


def test_a_parameter_of_no_module_is_described():
    model = nn.Linear(2, 2)
    explainer = ModelExplainer(model)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), math.inf)
    culprit = explainer.gradient(torch.optim.SGD([other], lr=0.1))
    assert culprit == NonFinite("", "a parameter of shape (3,)", "inf")


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Word 1 twice: its gradient is not coalesced, and only the sum of the two is infinite.
    vectors = model[0](torch.tensor([1, 1, 3]))
    loss = (vectors * torch.tensor([[3e38], [3e38], [1.0]])).sum() + model[1](vectors.detach()).sum()
    culprit = explain(model, loss, optimizer=optimizer)
    assert model[0].weight.grad.is_sparse
    assert (culprit.layer, culprit.value) == ("0", "inf")


def test_parametrized_weights_belong_to_their_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False)))
    culprit = explain(model, spoil(model(torch.ones(1, 2))).sum())
    assert culprit.layer == "1"
    assert culprit.name.startswith("1.parametrizations.weight.")


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def middle(x: torch.Tensor) -> torch.Tensor:
        return spoil(model[1](x))

    x = checkpoint(middle, model[0](torch.ones(1, 2)), use_reentrant=reentrant)
    assert explain(model, model[2](x).sum()).layer == "1"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_data_parallel_models_have_their_own_names(one_rank):
    model = Backwards()
    wrapped = nn.parallel.DistributedDataParallel(model)
    mp = MixedPrecision(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp", 2.0**4)
    with mp.autocast():
        loss = wrapped(torch.ones(1, 2)).float().sum()
    mp.backward(loss)
    assert mp.step() is False
    assert mp.skips[0].culprit.layer == "layers.2"


def test_a_compiled_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    explainer = ModelExplainer(model)
    compiled = torch.compile(model, backend="eager")
    assert explain(model, spoil(compiled(torch.ones(1, 2))).sum(), explainer).layer == "1"


def test_a_compiled_model_has_its_own_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    mp = MixedPrecision(compiled, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp", 2.0**4)
    assert list(mp.weights()) == list(model.state_dict())
    mp.backward(spoil(compiled(torch.ones(1, 2))).sum())
    assert mp.step() is False
    assert mp.skips[0].culprit.layer == "1"


@pytest.mark.parametrize("precision", ["fp16-master", "fp16-pure"])
def test_masters_are_explained_by_the_models_parameters(precision):
    model = Backwards()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, 2.0**4)
    with mp.autocast():
        loss = model(torch.ones(1, 2)).float().sum()
    mp.backward(loss)
    assert mp.step() is False
    assert mp.skips[0].culprit.layer == "layers.2"


def test_copies_and_pickles_of_the_model_carry_no_hooks():
    model = Backwards()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp", 2.0**4)
    mp._explainer._search.begin()  # the hooks of a search too
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        arrivals = dict(mp._explainer._arrivals)
        other(torch.ones(1, 2)).sum().backward()
        assert mp._explainer._arrivals == arrivals
        assert not mp._explainer._search._looks
        for parameter in other.parameters():
            assert not parameter._post_accumulate_grad_hooks
    model(torch.ones(1, 2)).sum().backward()
    assert mp._explainer._arrivals
    assert mp._explainer._search._looks


def test_detach_removes_every_hook():
    model = Backwards()
    explainer = ModelExplainer(model)
    explainer._search.begin()
    explainer.detach()
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_deleted_model_has_no_culprit():
    model = nn.Linear(2, 2)
    explainer = ModelExplainer(model)
    explainer._names.clear()
    del model
    assert explainer.forward() is None


# -- the forward --------------------------------------------------------------------------------------------------------


def broken_forward(model: nn.Module, *inputs: torch.Tensor, spoiled: Any = None) -> NonFinite:
    """Return the explanation after the second consecutive non-finite forward."""
    explainer = ModelExplainer(model)
    model(*inputs)
    first = explainer.forward()
    assert (first.layer, first.name) == ("", "loss")
    assert "next forward" in first.detail
    explainer.step_ended(forward_finite=False)
    model(*inputs)
    found = explainer.forward()
    explainer.step_ended(forward_finite=False)
    explainer.detach()
    return found


def multiplied(factor: float) -> nn.Module:
    return Of(lambda self, x: x * self.factor, factor=factor)


@pytest.mark.parametrize(("factor", "value"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_module_inside_containers(factor, value):
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid(), multiplied(factor))), nn.Tanh()
    )
    found = broken_forward(model, torch.ones(1, 2))
    assert (found.layer, found.name, found.value) == ("1.1.1", "1.1.1", value)


def with_functions(between: float, after: float) -> nn.Module:
    """Multiply between two layers of a part, and after them."""
    layers = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    part = Of(lambda self, x: self.two(self.one(x) * between) * after, **layers)
    return nn.Sequential(nn.Linear(2, 2), part, nn.Linear(2, 2))


def test_a_function_between_modules():
    found = broken_forward(with_functions(math.nan, 1.0), torch.ones(1, 2))
    assert (found.layer, found.name, found.value) == ("1", "1.two", "nan")
    assert "before '1.two'" in found.detail


def test_a_function_after_the_last_module_of_a_container():
    found = broken_forward(with_functions(1.0, math.nan), torch.ones(1, 2))
    assert (found.layer, found.name, found.value) == ("1", "1", "nan")


def test_data_that_are_not_finite():
    found = broken_forward(nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, math.nan]]))
    assert (found.layer, found.name, found.value) == ("", "0", "nan")


def test_an_infinity_that_arises_after_every_module():
    found = broken_forward(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    assert (found.layer, found.name) == ("", "loss")
    assert "in the code after them, or in the loss" in found.detail


@dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"logits": x, "none": None},
        lambda x: (x, 3),
        lambda x: [{"deep": (x,)}],
        lambda x: Output(x),
        lambda x: torch.return_types.max((x, torch.zeros(1))),
    ],
    ids=["dict", "tuple", "nested", "dataclass", "named tuple"],
)
def test_outputs_of_every_kind(wrap):
    model = nn.Sequential(nn.Linear(2, 2), Of(lambda self, x: wrap(x * math.nan)))
    assert broken_forward(model, torch.ones(1, 2)).layer == "1"


def test_keyword_arguments_are_inputs():
    takes = Of(lambda self, *, x: x + 1)
    found = broken_forward(Of(lambda self, x: self.takes(x=x * math.nan), takes=takes), torch.ones(1, 2))
    assert (found.layer, found.name) == ("", "takes")
    assert "before" in found.detail


def test_a_non_finite_weight_is_named_at_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[1].bias[0] = math.inf
    found = ModelExplainer(model).forward()
    assert (found.layer, found.name, found.value) == ("1", "1.bias", "inf")


def test_a_non_finite_statistic_is_named_but_a_mask_is_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    explainer = ModelExplainer(model)
    assert explainer.forward().name == "loss"
    model[1].running_mean[0] = math.nan
    assert explainer.forward().name == "1.running_mean"


def test_masks_are_passed_over():
    """A module makes a mask of 0 and -inf, which softmax consumes; a later module breaks."""
    mask = Of(lambda self, x: torch.full((4, 4), -math.inf).triu(1))
    layers = {"mask": mask, "scores": nn.Linear(4, 4), "softmax": nn.Softmax(-1), "times": multiplied(math.nan)}
    model = Of(lambda self, x: self.times(self.softmax(self.scores(x) + self.mask(x))), **layers)
    found = broken_forward(model, torch.ones(4, 4))
    assert (found.layer, found.value) == ("times", "nan")


def test_a_module_that_is_non_finite_in_good_forwards_is_not_suspected():
    """A module returns a harmless +inf, which is recognised after one forward with a finite loss."""
    layers = {"inverse": Of(lambda self, x: 1 / torch.zeros(2)), "times": multiplied(math.nan)}
    model = Of(lambda self, x: self.times(torch.minimum(x, self.inverse(x))), **layers)
    explainer = ModelExplainer(model)
    seen = []
    for factor in (math.nan, 1.0, math.nan, math.nan):
        model.times.factor = factor
        finite = bool(model(torch.ones(1, 2)).isfinite().all())
        seen.append(None if finite else explainer.forward().layer)
        explainer.step_ended(forward_finite=finite)
    assert seen == ["", None, "", "times"]


def test_a_logarithm_of_zero_is_where_it_began():
    log = Of(lambda self, x: (x * 0).log())
    model = nn.Sequential(log, nn.Linear(2, 2, bias=False), nn.Tanh())
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
    found = broken_forward(model, torch.ones(1, 2))
    assert (found.layer, found.value) == ("0", "inf")
    only = broken_forward(nn.Sequential(nn.Identity(), log), torch.ones(1, 2))
    assert (only.layer, only.value) == ("1", "inf")


def test_a_row_that_is_masked_in_full_is_the_softmaxs():
    layers = {"scores": nn.Linear(2, 2), "softmax": nn.Softmax(-1)}
    found = broken_forward(Of(lambda self, x: self.softmax(self.scores(x) - math.inf), **layers), torch.ones(1, 2))
    assert (found.layer, found.value) == ("softmax", "nan")


def test_one_bad_batch_ends_the_search_at_the_next_good_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    scaler = LossScaler("cpu", 2.0**10, forward_nonfinite="hold")
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp", scaler)
    hooks_before = [len(module._forward_hooks) for module in model.modules()]
    hooks = []
    for value in (1.0, math.nan, 1.0, 1.0):
        mp.zero_grad()
        with mp.autocast():
            loss = model(torch.full((4, 2), value)).float().mean()
        mp.backward(loss)
        if math.isnan(value):
            with pytest.warns(LossScaleWarning, match="not finite already"):
                assert mp.step() is False
        else:
            assert mp.step()
        hooks.append([len(module._forward_hooks) for module in model.modules()])
    assert hooks[1] == [count + 1 for count in hooks_before]
    assert hooks[0] == hooks[2] == hooks[3] == hooks_before
    assert not mp._explainer._search._looks
    assert (mp.skipped_steps, mp.loss_scale) == (1, 2.0**10)


def test_a_cause_found_at_once_is_warned_about_once():
    model = nn.Linear(2, 1)
    scaler = LossScaler("cpu", 2.0**10, forward_nonfinite="hold")
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-amp", scaler)
    with torch.no_grad():
        model.bias.fill_(math.nan)

    def three_steps() -> None:
        for _ in range(3):
            mixed_step(mp, lambda: model(torch.ones(1, 2)).float().square().sum())

    with pytest.warns(LossScaleWarning, match="'bias' itself is not finite") as caught:
        three_steps()
    assert len(caught) == 1


def test_a_compiled_forward_is_explained_without_a_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    explainer = ModelExplainer(model)
    # Torch 2.6 counts compilations of nn.Sequential.forward over all models, and runs it uncompiled from the ninth on.
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2))
    for words in ("next forward", "torch.compile"):
        assert words in explainer.forward().detail
        explainer.step_ended(forward_finite=False)
        compiled(torch.ones(1, 2))


def test_a_loss_scaler_by_itself_names_the_layer_and_ends_the_search():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = LossScaler("cpu", explainer=ModelExplainer(model), forward_nonfinite="hold")

    def train(x: torch.Tensor, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        out = model(x)
        if factor != 1.0:
            out.register_hook(lambda gradient: gradient * factor)
        scaler.scale(out.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    train(torch.ones(1, 2), math.inf)
    assert scaler.skips[-1].culprit.layer == "2"
    with pytest.warns(LossScaleWarning):
        train(torch.full((1, 2), math.nan))
    assert all(module._forward_hooks for module in model)
    train(torch.full((1, 2), math.nan))
    assert scaler.skips[-1].culprit.name == "0"
    train(torch.ones(1, 2))
    assert not any(module._forward_hooks for module in model)
    assert scaler.skipped_steps == 3
