"""FP32 master weights, for any model and optimizer, and by hand as in NVIDIA's GTC 2018 talk."""

import copy
import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.training.masters import (
    BN_convert_float,
    MasterWeights,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from mpinspect.training.precision import PRECISIONS, convert_model

FP16_MASTER = PRECISIONS["fp16-master"]
MASTER_MODES = [PRECISIONS["fp16-master"], PRECISIONS["bf16-master"]]
#: The simple network of the talk.
N, D_IN, D_OUT = 64, 1024, 512


@contextmanager
def half_forward():
    with half_arithmetic(), torch.autocast("cpu", torch.float16):
        yield


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))


def backward(model: nn.Module, features: int = 6, seed: int = 1) -> None:
    x = torch.randn(16, features, generator=torch.Generator().manual_seed(seed))
    with half_arithmetic():
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()


def train(model: nn.Module, masters: MasterWeights, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        masters.zero_grad()
        masters.check_zeroed()
        backward(model, seed=step)
        masters.gradients_to_masters()
        optimizer.step()
        masters.masters_to_model()


# -- the split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", MASTER_MODES, ids=lambda precision: precision.name)
def test_masters_hold_the_weights_from_before_the_conversion(precision):
    model = small_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], precision)
    held = dict(zip(before, optimizer.param_groups[0]["params"], strict=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name], before[name])
        assert held[name].dtype == torch.float32
        if name.startswith("1."):  # BatchNorm
            assert held[name] is parameter
        else:
            assert held[name] is not parameter
            assert torch.equal(parameter, before[name].to(precision.stored))
    assert len(masters) == 6
    assert masters.state_dict().keys() == {name for name in before if not name.startswith("1.")}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_groups_preserve_their_order_and_options_and_their_state_moves(optimizers):
    model = small_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.5}, {"params": parameters[3:], "weight_decay": 0.25, "tag": "rest"}]
    made = [torch.optim.SGD(groups, lr=0.125, momentum=0.9) for _ in range(optimizers)]
    backward(model)
    for optimizer in made:
        optimizer.step()
    kept = [[optimizer.state[p]["momentum_buffer"].clone() for p in parameters] for optimizer in made]
    lists = [[group["params"] for group in optimizer.param_groups] for optimizer in made]
    options = [[{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] for optimizer in made]
    states = [optimizer.state for optimizer in made]

    MasterWeights.split(model, made, FP16_MASTER)

    for optimizer, momenta, old_lists, old_options, state in zip(made, kept, lists, options, states, strict=True):
        assert optimizer.state is state
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == old_options
        assert all(g["params"] is old for g, old in zip(optimizer.param_groups, old_lists, strict=True))
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert [parameter.shape for parameter in held] == [parameter.shape for parameter in parameters]
        assert list(state) == held
        for master, momentum in zip(held, momenta, strict=True):
            assert torch.equal(state[master]["momentum_buffer"], momentum)
        assert state[torch.zeros(())] == {}  # still makes entries for new parameters
    assert {id(p) for g in made[0].param_groups for p in g["params"]} == {
        id(p) for g in made[-1].param_groups for p in g["params"]
    }


def test_masters_of_a_half_model_start_from_its_weights_with_fp32_state():
    model = small_model().half()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    stepped = [parameter.detach().clone() for parameter in model.parameters()]
    assert not torch.equal(weights[0], stepped[0])
    MasterWeights.split(model, [optimizer], FP16_MASTER)
    for master, weight in zip(optimizer.param_groups[0]["params"], stepped, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master, weight.float())
        assert torch.equal(optimizer.state[master]["momentum_buffer"], torch.full_like(master, 3.0))
        assert optimizer.state[master]["momentum_buffer"].dtype == torch.float32
    assert model[1].weight.dtype == model[1].running_var.dtype == torch.float32
    assert model[2].weight.dtype == torch.float16


def test_tied_weights_have_one_master_under_both_names():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert model[1].weight is model[0].weight
    assert len(masters) == 1
    state = masters.state_dict()
    assert state.keys() == {"0.weight", "1.weight"}
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_frozen_parameters_and_those_without_an_optimizer():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert [p.requires_grad for p in optimizer.param_groups[0]["params"]] == [False, True, True, True]
    assert not model[0].weight.requires_grad
    assert model[4].weight.dtype == torch.float16
    assert "4.weight" not in masters.state_dict()
    before = model[0].weight.detach().clone()
    train(model, masters, optimizer, steps=2)
    assert torch.equal(model[0].weight, before)


def test_parameters_that_the_model_does_not_have_are_not_changed():
    model, temperature = small_model(), nn.Parameter(torch.ones(()))
    half = nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD([*model.parameters(), temperature, half], lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert optimizer.param_groups[0]["params"][-2] is temperature
    assert optimizer.param_groups[0]["params"][-1] is half
    temperature.grad, half.grad = torch.ones(()), torch.ones(2).half()
    masters.gradients_to_masters()
    assert temperature.grad == 1
    masters.adopt(optimizer)
    assert optimizer.param_groups[0]["params"][-1] is half
    masters.zero_grad()
    assert temperature.grad is None
    assert half.grad is None


def test_a_mode_without_masters_converts_only_the_state():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    held = list(optimizer.param_groups[0]["params"])
    masters = MasterWeights.split(model, [optimizer], PRECISIONS["fp16-pure"])
    assert len(masters) == 0
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if name.startswith("1.") else torch.float16
        state = optimizer.state[parameter]
        assert parameter.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wanted
        assert state["step"].dtype == torch.float32
    train(model, masters, optimizer)


@pytest.mark.parametrize("name", ["fp32", "fp16-amp", "bf16-amp"])
def test_a_mode_that_stores_fp32_leaves_the_model_unchanged(name):
    model = small_model()
    parameters, kinds = list(model.parameters()), [type(module) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], PRECISIONS[name])
    assert len(masters) == 0
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert [type(module) for module in model.modules()] == kinds


def test_an_error_leaves_the_model_unchanged():
    model = small_model()
    with torch.no_grad():
        model[4].bias[0] = 1e6
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'4.bias' holds values beyond 65504"):
        MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert all(tensor.dtype == before[name].dtype for name, tensor in model.state_dict().items())
    assert [type(module) for module in model] == [nn.Linear, nn.BatchNorm1d, nn.LayerNorm, nn.ReLU, nn.Linear]


def test_parameters_added_to_an_optimizer_later_are_adopted():
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
    optimizer.add_param_group({"params": list(model[1].parameters())})
    masters.adopt(optimizer)
    masters.adopt(optimizer)
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
    assert len(masters) == 4
    assert optimizer.param_groups[1]["lr"] == 0.5
    before = model[4].weight.detach().clone()
    train(model, masters, optimizer)
    assert not torch.equal(model[4].weight, before)


# -- a step ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_masters_as_it_would_step_fp32_weights(name):
    """With equal FP32 gradients, weights are bit-identical to a plain FP32 model's, also with optimizer state from before."""
    plain, model = small_model(), small_model()
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for each, its in ((plain, plain_optimizer), (model, optimizer)):
        backward(each)
        its.step()
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    for step in range(3):
        masters.zero_grad()
        backward(model, seed=step)
        masters.gradients_to_masters()
        for parameter, half in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.grad = half.grad.float()
        optimizer.step()
        plain_optimizer.step()
        masters.masters_to_model()
    for parameter, master, half in zip(
        plain.parameters(), optimizer.param_groups[0]["params"], model.parameters(), strict=True
    ):
        assert torch.equal(parameter, master)
        assert torch.equal(half, parameter.to(half.dtype))


def test_lbfgs_steps_the_masters():
    model, plain = nn.Linear(6, 4), nn.Linear(6, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    plain_optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=4, history_size=3)
    for each, its in ((model, optimizer), (plain, plain_optimizer)):
        its.step(lambda each=each, its=its: plain_closure(each, its))
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert optimizer._params is optimizer.param_groups[0]["params"]
    assert list(optimizer.state) == [masters.pairs()[0][1]]

    def closure():
        masters.masters_to_model()
        masters.zero_grad()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
        with half_arithmetic():
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            loss.backward()
        masters.gradients_to_masters()
        return loss

    first = optimizer.step(closure)
    for _ in range(4):
        optimizer.step(closure)
    masters.masters_to_model()
    assert closure() < first / 100
    assert all(torch.equal(half, master.half()) for half, master in masters.pairs())


def plain_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 6, generator=torch.Generator().manual_seed(0))).square().mean()
    loss.backward()
    return loss


def test_a_sparse_half_gradient_is_summed_in_fp32():
    """Row 1 is used twice with a gradient of 40000, whose sum overflows FP16."""
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    ((half, master),) = masters.pairs()
    (model(torch.tensor([1, 3, 1])).float() * 40000.0).sum().backward()
    assert half.grad.is_sparse
    assert half.grad.dtype == torch.float16
    masters.gradients_to_masters()
    assert master.grad.is_coalesced()
    assert master.grad.to_dense().tolist() == [[0, 0], [80000, 80000], [0, 0], [40000, 40000], [0, 0]]
    before = master.detach().clone()
    optimizer.step()
    masters.masters_to_model()
    assert (master != before).any(dim=1).tolist() == [False, True, False, True, False]
    with pytest.raises(RuntimeError, match="'weight'"):
        masters.check_zeroed()
    masters.zero_grad()
    masters.check_zeroed()
    # A dense gradient after a sparse one, and back.
    half.grad = torch.ones_like(half)
    masters.gradients_to_masters()
    assert torch.equal(master.grad, torch.ones(5, 2))


def test_a_missing_gradient_remains_none():
    model = small_model()
    masters = MasterWeights.split(model, [torch.optim.SGD(model.parameters(), lr=0.1)], FP16_MASTER)
    backward(model)
    masters.gradients_to_masters()
    assert all(master.grad is not None for _, master in masters.pairs())
    masters.zero_grad()
    model[4](torch.ones(1, 8).half()).sum().backward()
    masters.gradients_to_masters()
    have = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert have == {"4.weight", "4.bias"}
    assert sum(master.grad is not None for _, master in masters.pairs()) == 2


def test_channels_last_weights_preserve_their_layout():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.param_groups[0]["params"][0].is_contiguous(memory_format=torch.channels_last)
    model.weight.grad = torch.randn(4, 3, 3, 3).half()
    masters.gradients_to_masters()
    assert torch.equal(optimizer.param_groups[0]["params"][0].grad, model.weight.grad.float())


def test_updates_too_small_for_half_weights_accumulate():
    """100 updates of 2^-14 to a weight of 1: each is lost in FP16, where 1 + 2^-10 follows 1."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    results = {}
    for name in ("fp16-master", "fp16-pure"):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=2.0**-14)
        masters = MasterWeights.split(trained, [optimizer], PRECISIONS[name])
        for _ in range(100):
            trained.weight.grad = torch.full((1, 1), -1.0).half()
            masters.gradients_to_masters()
            optimizer.step()
            masters.masters_to_model()
        results[name] = trained.weight.item()
    assert results == {"fp16-master": 1 + 6 * 2.0**-10, "fp16-pure": 1.0}


# -- weights loaded into the model ------------------------------------------------------------------------------------


def test_weights_loaded_into_the_model_are_noticed_and_reach_the_masters():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    train(model, masters, optimizer, steps=2)
    assert masters.changed_in_model() == []
    other = small_model()
    with torch.no_grad():
        other[4].weight.fill_(0.1)
    model.load_state_dict(other.state_dict())
    assert set(masters.changed_in_model()) == set(masters.state_dict())
    masters.model_to_masters()
    assert masters.changed_in_model() == []
    for half, master in masters.pairs():
        assert torch.equal(master, half.float())
    with torch.no_grad():
        model[0].bias.clamp_(-0.01, 0.01)
    assert masters.changed_in_model() == ["0.bias"]


def test_masters_are_saved_and_loaded_by_name():
    model, other = small_model(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    train(model, masters, optimizer, steps=3)
    with torch.no_grad():
        other[0].weight.zero_()
    others = MasterWeights.split(other, [torch.optim.SGD(other.parameters(), lr=0.1)], FP16_MASTER)
    others.load_state_dict(masters.state_dict())
    for (half, master), (other_half, other_master) in zip(masters.pairs(), others.pairs(), strict=True):
        assert torch.equal(master, other_master)
        assert torch.equal(half, other_half)
    assert others.changed_in_model() == []
    others.load_state_dict(small_model().state_dict())  # a whole FP32 model's
    assert torch.equal(others.state_dict()["0.weight"], small_model()[0].weight)


def test_masters_of_another_model_are_refused_before_any_change():
    model = small_model()
    masters = MasterWeights.split(model, [torch.optim.SGD(model.parameters(), lr=0.1)], FP16_MASTER)
    before = {name: master.clone() for name, master in masters.state_dict().items()}
    good = {name: torch.zeros_like(master) for name, master in before.items()}
    with pytest.raises(ValueError, match=r"'4.bias' is missing"):
        masters.load_state_dict({name: tensor for name, tensor in good.items() if name != "4.bias"})
    with pytest.raises(ValueError, match=r"'4.bias' has the shape \(5,\), not \(4,\)"):
        masters.load_state_dict(good | {"4.bias": torch.zeros(5)})
    assert all(torch.equal(master, before[name]) for name, master in masters.state_dict().items())


# -- gradients that were never zeroed ---------------------------------------------------------------------------------


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


ZEROED = {
    "masters.zero_grad()": lambda model, masters: masters.zero_grad(),
    "masters.zero_grad(False)": lambda model, masters: masters.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, masters: model.zero_grad(),
    "model.zero_grad(False)": lambda model, masters: model.zero_grad(set_to_none=False),
    "zero_()": lambda model, masters: [p.grad.zero_() for p in with_gradients(model)],
    "detach().zero_()": lambda model, masters: [p.grad.detach().zero_() for p in with_gradients(model)],
    "data.zero_()": lambda model, masters: [p.grad.data.zero_() for p in with_gradients(model)],
    "None": lambda model, masters: [setattr(p, "grad", None) for p in model.parameters()],
    "new zeros": lambda model, masters: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
    "foreach": lambda model, masters: torch._foreach_zero_([p.grad for p in with_gradients(model)]),
}


@settings(max_examples=25, deadline=None)
@given(
    ways=st.lists(st.sampled_from(sorted(ZEROED)), min_size=1, max_size=6),
    optimizer_too=st.booleans(),
    precision=st.sampled_from(MASTER_MODES),
)
def test_check_zeroed_is_silent_after_zeroing_and_never_otherwise(ways, optimizer_too, precision):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    masters = MasterWeights.split(model, [optimizer], precision)
    for way in ways:
        masters.check_zeroed()
        backward(model)
        masters.check_zeroed()  # this step has not reached the masters
        backward(model)  # a second micro-batch
        masters.gradients_to_masters()
        with pytest.raises(RuntimeError, match=r"'0\.weight' .* has not been zeroed since.*call model\.zero_grad\(\)"):
            masters.check_zeroed()
        optimizer.step()
        masters.masters_to_model()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="gradients of two steps add up"):
            masters.check_zeroed()
        ZEROED[way](model, masters)
        if optimizer_too:
            optimizer.zero_grad()
        masters.check_zeroed()


def test_gradients_are_freed():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    train(model, masters, optimizer)
    gradients = [weakref.ref(half.grad) for half, _ in masters.pairs()]
    assert all(reference() is not None for reference in gradients)
    masters.zero_grad()
    assert all(reference() is None for reference in gradients)
    weights = [weakref.ref(tensor) for pair in masters.pairs() for tensor in pair]
    del model, optimizer, masters
    gc.collect()
    assert all(reference() is None for reference in weights)


def test_optimizers_and_models_can_be_copied_after_training():
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    train(model, masters, optimizer)
    model_copy, optimizer_copy = copy.deepcopy(model), copy.deepcopy(optimizer)
    assert torch.equal(model_copy[0].weight, model[0].weight)
    assert torch.equal(optimizer_copy.param_groups[0]["params"][0], optimizer.param_groups[0]["params"][0])


def test_views_of_a_bucket_are_not_judged():
    """DistributedDataParallel(gradient_as_bucket_view=True) sets the same view again after it was set to None."""
    parameter = nn.Parameter(torch.ones(4).half())
    bucket = torch.ones(8).half()
    view = bucket[:4]
    master = [nn.Parameter(torch.ones(4))]
    parameter.grad = view
    model_grads_to_master_grads([parameter], master)
    parameter.grad = None
    view.fill_(2.0)
    parameter.grad = view
    model_grads_to_master_grads([parameter], master)
    assert master[0].grad.tolist() == [2.0] * 4


# -- by hand, with the talk's own functions ---------------------------------------------------------------------------


def simple_network(bias: bool = True) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(N, D_IN), torch.randn(N, D_OUT), nn.Linear(D_IN, D_OUT, bias=bias)


def talk_loop(flat_master: bool, steps: int = 20, momentum: float = 0.0) -> tuple[list[float], nn.Module, list]:
    """The talk's loop: half model, FP32 masters, loss times 128."""
    x, y, model = simple_network()
    x, model = x.half(), model.half()
    model_params, master_params = prep_param_lists(model, flat_master)
    optimizer = torch.optim.SGD(master_params, lr=1e-3, momentum=momentum)
    losses = []
    for _ in range(steps):
        with half_arithmetic():
            loss = F.mse_loss(model(x).float(), y)
            model.zero_grad()
            (128.0 * loss).backward()
        model_grads_to_master_grads(model_params, master_params, flat_master)
        for parameter in master_params:
            parameter.grad.data.mul_(1.0 / 128.0)
        optimizer.step()
        master_params_to_model_params(model_params, master_params, flat_master)
        losses.append(loss.item())
    return losses, model, master_params


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_talks_loop_by_hand_is_bit_equal_to_master_weights(momentum):
    losses, by_hand, master_params = talk_loop(flat_master=False, momentum=momentum)
    x, y, model = simple_network()
    optimizer = torch.optim.SGD(model.half().parameters(), lr=1e-3, momentum=momentum)
    masters = MasterWeights.split(model, [optimizer], FP16_MASTER)
    for by_hand_loss in losses:
        masters.zero_grad()
        with half_forward():
            loss = F.mse_loss(model(x.half()).float(), y)
        with half_arithmetic():
            (128.0 * loss).backward()
        masters.gradients_to_masters()
        for _, master in masters.pairs():
            master.grad.mul_(1.0 / 128.0)
        optimizer.step()
        masters.masters_to_model()
        assert loss.item() == by_hand_loss
    for parameter, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(parameter, other)
    for (_, master), other in zip(masters.pairs(), master_params, strict=True):
        assert torch.equal(master, other)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_flat_master_is_bit_equal_to_one_for_each(momentum):
    losses, model, separate = talk_loop(flat_master=False, momentum=momentum)
    flat_losses, flat_model, (flat,) = talk_loop(flat_master=True, momentum=momentum)
    assert flat_losses == losses
    assert flat.shape == (D_IN * D_OUT + D_OUT,)
    assert isinstance(flat, nn.Parameter)
    assert torch.equal(flat, torch.cat([master.detach().reshape(-1) for master in separate]))
    for parameter, other in zip(model.parameters(), flat_model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_prep_param_lists_takes_the_trained_parameters_in_order():
    model = small_model().half()
    model[0].bias.requires_grad_(False)
    model_params, master_params = prep_param_lists(model)
    assert [id(p) for p in model_params] == [id(p) for n, p in model.named_parameters() if n != "0.bias"]
    for parameter, master in zip(model_params, master_params, strict=True):
        assert master.dtype == torch.float32
        assert master.requires_grad
        assert master.is_leaf
        assert torch.equal(master, parameter.float())
        assert master.data_ptr() != parameter.data_ptr()
    full = nn.Linear(2, 2)
    _, (weight, _) = prep_param_lists(full)
    assert weight.data_ptr() != full.weight.data_ptr()


def test_a_flat_master_needs_one_dtype():
    with pytest.raises(ValueError, match=r"one dtype, the model has torch\.float16 and torch\.float32"):
        prep_param_lists(BN_convert_float(small_model().half()), flat_master=True)
    with pytest.raises(ValueError, match="no parameters at all"):
        prep_param_lists(nn.ReLU(), flat_master=True)


def test_a_flat_master_takes_missing_gradients_as_zeros():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).half()
    model_params, master_params = prep_param_lists(model, flat_master=True)
    model_params[0].grad = torch.ones(2, 2).half()
    model_grads_to_master_grads(model_params, master_params, flat_master=True)
    assert master_params[0].grad.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    model_params[0].grad, model_params[3].grad = None, torch.full((1,), 2.0).half()
    model_grads_to_master_grads(model_params, master_params, flat_master=True)
    assert master_params[0].grad.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("flat_master", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroing_the_masters_gradients_only_is_an_error_at_the_second_step(flat_master, set_to_none):
    x, y, model = simple_network()
    model_params, master_params = prep_param_lists(model.half(), flat_master)
    optimizer = torch.optim.SGD(master_params, lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none)
        with half_arithmetic():
            F.mse_loss(model(x.half()).float(), y).backward()
        model_grads_to_master_grads(model_params, master_params, flat_master)

    step()
    with pytest.raises(RuntimeError, match=r"optimizer\.zero_grad\(\) zeroes the masters' gradients only"):
        step()


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_both_ways_of_zeroing_the_models_gradients_work(set_to_none, micro_batches):
    """A parameter without a gradient in the second step has zeros or None, depending on ``zero_grad``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model_params, master_params = prep_param_lists(model)
    for step in range(4):
        model.zero_grad(set_to_none)
        for _ in range(micro_batches):
            with half_arithmetic():
                (model if step % 2 == 0 else model[1])(torch.ones(2, 4).half()).float().sum().backward()
        model_grads_to_master_grads(model_params, master_params)
        for parameter, master in zip(model_params, master_params, strict=True):
            assert (master.grad is None) == (parameter.grad is None)
            if parameter.grad is not None:
                assert torch.equal(master.grad, parameter.grad.float())
        if step % 2 and not set_to_none:
            assert not model_params[0].grad.any()


def test_bn_convert_float_puts_norms_with_running_statistics_back_to_fp32():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Sequential(nn.BatchNorm1d(2, affine=False)),
        nn.InstanceNorm2d(2, True),
    ).half()
    assert BN_convert_float(model) is model
    assert model[0].weight.dtype == torch.float16
    assert model[1].weight.dtype == model[1].running_var.dtype == torch.float32
    assert model[2][0].running_mean.dtype == torch.float32
    assert model[2][0].num_batches_tracked.dtype == torch.int64
    assert {p.dtype for p in model[3].parameters()} <= {torch.float32}
    lone = nn.BatchNorm1d(3).half()
    assert BN_convert_float(lone).weight.dtype == torch.float32


# -- laws -----------------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=20), stored=st.sampled_from([torch.float16, torch.bfloat16]))
def test_masters_reach_the_model_by_torchs_own_cast(values, stored):
    master = torch.tensor(values)
    parameter = nn.Parameter(torch.zeros(len(values), dtype=stored))
    master_params_to_model_params([parameter], [master])
    assert torch.equal(parameter.view(torch.int16), master.to(stored).view(torch.int16))
    flat_parameter = nn.Parameter(torch.zeros(len(values), dtype=stored))
    master_params_to_model_params([flat_parameter], [master], flat_master=True)
    assert torch.equal(flat_parameter.view(torch.int16), parameter.view(torch.int16))


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=20), bf16=st.booleans())
def test_gradients_are_converted_to_the_masters_exactly_and_back(codes, bf16):
    dtype = torch.bfloat16 if bf16 else torch.float16
    half = torch.tensor(codes, dtype=torch.int16).view(dtype)
    parameter, master = nn.Parameter(torch.zeros_like(half)), nn.Parameter(torch.zeros(len(codes)))
    parameter.grad = half.clone()
    for flat_master in (False, True):
        model_grads_to_master_grads([parameter], [master], flat_master)
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad.nan_to_num(7.0), half.float().nan_to_num(7.0))
        assert torch.equal(master.grad.isnan(), half.isnan())
        parameter.grad = half.clone()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), precision=st.sampled_from(MASTER_MODES))
def test_model_to_masters_and_back_changes_no_bit(seed, precision):
    torch.manual_seed(seed)
    model = nn.Linear(3, 5)
    masters = MasterWeights.split(model, [torch.optim.SGD(model.parameters(), lr=0.1)], precision)
    ((weight, _), _) = masters.pairs()
    with torch.no_grad():
        weight.copy_(torch.randn(5, 3) * 2.0 ** torch.randint(-26, 16, (5, 3)))
    before = weight.detach().clone()
    masters.model_to_masters()
    masters.masters_to_model()
    assert torch.equal(weight, before)
    rounded = [master.detach().clone() for _, master in masters.pairs()]
    masters.model_to_masters()
    assert all(torch.equal(a, b) for a, (_, b) in zip(rounded, masters.pairs(), strict=True))


def test_convert_model_converts_as_split_does():
    converted, split = convert_model(small_model(), FP16_MASTER), small_model()
    MasterWeights.split(split, [torch.optim.SGD(split.parameters(), lr=0.1)], FP16_MASTER)
    assert [type(module) for module in converted] == [type(module) for module in split]
    for (name, tensor), (_, other) in zip(converted.state_dict().items(), split.state_dict().items(), strict=True):
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other)
