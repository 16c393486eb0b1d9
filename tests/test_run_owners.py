"""`mpinspect run`: which module is the model, told from an optimizer's parameters and from what the script calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watched_training import train, watched

from mpinspect.launch.models import graph
from mpinspect.launch.models.owners import Holders, living_modules, parameter_ids, unwrapped


def ids(*modules: nn.Module) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def targets(wanted: set[int], called: nn.Module | None = None) -> list[nn.Module]:
    return Holders(wanted, living_modules()).targets(called)


class Whole(nn.Module):
    """As a Lightning module: it is given losses to compute, and its own forward is never called."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_the_called_module_that_holds_everything():
    model = Whole(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2))
    assert targets(ids(model), model) == [model]
    assert targets(ids(model.decoder), model) == [model]
    assert targets(ids(model.decoder), model.decoder) == [model.decoder]


def test_the_smallest_that_holds_everything_if_parts_are_called():
    model = Whole(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2), other=nn.Linear(1, 1))
    both = Whole(encoder=model.encoder, decoder=model.decoder)
    assert targets(ids(model.encoder, model.decoder), model.encoder) == [both]


def test_a_parent_that_adds_no_parameters_names_the_whole():
    whole = Whole(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert targets(ids(whole), whole.net) == [whole]
    wider = Whole(net=nn.Linear(2, 2), teacher=nn.Linear(2, 2))
    assert targets(ids(wider.net), wider.net) == [wider.net]


def test_two_parents_side_by_side_are_neither_the_model():
    net = nn.Linear(2, 2)
    parents = [Whole(net=net), Whole(net=net)]
    assert targets(ids(net), net) == [net]
    assert len(parents) == 2


def test_networks_without_a_common_module_are_one_each():
    encoder, decoder = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 3))
    found = targets(ids(encoder, decoder), encoder)
    assert {id(module) for module in found} == {id(encoder), id(decoder)}


def test_parameters_of_no_module_hold_nothing():
    holders = Holders({id(torch.ones(1))}, living_modules())
    assert (holders.modules, holders.targets(None)) == ([], [])


def test_parameters_that_were_replaced_do_not_matter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = ids(model)
    old, model[1] = model[1], nn.Linear(2, 5)
    assert old is not model[1]
    holders = Holders(before - ids(old), living_modules())
    assert holders.targets(model) == [model]


def test_tied_parameters():
    model = Whole(embedding=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False))
    model.head.weight = model.embedding.weight
    assert targets(ids(model), model) == [model]
    assert len(set(parameter_ids(model))) == 1


def test_wrappers_are_looked_through():
    net = nn.Linear(2, 2)
    compiled = torch.compile(net, backend="eager")
    parallel = nn.DataParallel(net)
    assert unwrapped(compiled) is unwrapped(parallel) is unwrapped(net) is net
    assert unwrapped(nn.DataParallel(compiled)) is net


def test_a_module_that_holds_itself():
    model = Whole(net=nn.Linear(2, 2))
    model.net.__dict__["_modules"]["back"] = model
    assert targets(ids(model), model) == [model]
    assert len(list(parameter_ids(model))) == 2


def test_leaves_of_a_graph():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].bias.requires_grad_(False)
    x = torch.ones(1, 2, requires_grad=True)
    loss = net(x).sum()
    expected = {id(parameter) for parameter in net.parameters() if parameter.requires_grad} | {id(x)}
    assert graph.leaves(loss).keys() == expected
    assert graph.leaves([loss, loss]).keys() == expected
    assert graph.leaves(x).keys() == {id(x)}
    assert graph.leaves(None) == graph.leaves(torch.ones(1)) == {}


# -- with a training ---------------------------------------------------------------------------------------------------------


def test_names_are_those_of_a_root_that_is_never_called(tmp_path):
    with watched(tmp_path) as run:
        whole = Whole(net=nn.Sequential(nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(whole.parameters())
        train(whole.net, optimizer)
    assert (run.names, run.gradients()) == (["Whole"], {"net.0.weight", "net.0.bias"})


def test_a_frozen_backbone(tmp_path):
    with watched(tmp_path) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        train(model, torch.optim.SGD(model[2].parameters()))
    assert (run.names, run.gradients(), run.steps()) == (["Sequential"], {"2.weight", "2.bias"}, 3)


def test_a_student_and_its_teacher(tmp_path):
    with watched(tmp_path) as run:
        teacher, student = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(student.parameters())
        for _ in range(3):
            x = torch.randn(5, 4)
            with torch.no_grad():
                wanted = teacher(x)
            (student(x) - wanted).square().mean().backward()
            optimizer.step()
    assert (run.names, run.gradients()) == (["Sequential"], {"0.weight", "0.bias"})


def test_an_encoder_and_a_decoder_of_their_own(tmp_path):
    with watched(tmp_path) as run:
        encoder, decoder = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(3, 4))
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()])
        for _ in range(3):
            decoder(encoder(torch.randn(5, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(run.names) == ["Sequential", "Sequential-2"]
    assert [run.steps(0), run.steps(1)] == [3, 3]


@pytest.mark.parametrize("wrap_first", [False, True], ids=["optimizer-first", "wrapper-first"])
def test_a_distributed_wrapper(tmp_path, wrap_first):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with watched(tmp_path / "run") as run:
            model = nn.Sequential(nn.Linear(4, 2))
            if wrap_first:
                wrapped = nn.parallel.DistributedDataParallel(model)
                optimizer = torch.optim.SGD(wrapped.parameters())
            else:
                optimizer = torch.optim.SGD(model.parameters())
                wrapped = nn.parallel.DistributedDataParallel(model)
            train(wrapped, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    assert (run.names, run.gradients(), run.steps()) == (["Sequential"], {"0.weight", "0.bias"}, 3)


def test_sharpness_aware_minimisation(tmp_path):
    """An optimizer that makes another one of the same parameters and never steps itself."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        def step(self, closure: object = None) -> None:
            self.base.step()

    with watched(tmp_path) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        train(model, Sam(model.parameters()), steps=4)
    assert (run.names, run.seen.optimizers) == (["Sequential"], 2)
    assert run.steps() in (4, 8)


def test_a_model_whose_forward_method_is_called_directly(tmp_path):
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with watched(tmp_path) as run:
        model = Direct()
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(3):
            scaler.scale(model.forward(torch.randn(5, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert (run.names, run.gradients(), run.steps()) == (["Direct"], {"weight"}, 3)
    assert [change.scale for change in run.parts.models[0].session.progress.scales] == [4.0]
