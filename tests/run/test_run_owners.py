"""``mpinspect run`` finds the model from an optimizer's parameters and the modules that the script calls."""

import copy
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from models import Of
from torch import nn
from trainings import take_step
from watched_training import train, watched

from mpinspect.ranges.analyse import analyse
from mpinspect.run.models.backwards import leaves
from mpinspect.run.models.naming import names_of
from mpinspect.run.models.owners import Holders, living_modules, parameter_ids, unwrapped


def ids(*modules: nn.Module) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def targets(wanted: set[int], called: nn.Module | None = None) -> list[nn.Module]:
    return Holders(wanted, living_modules()).targets(called)


class Net(nn.Sequential): ...


class Whole(nn.Module):
    """Like a Lightning module, it contains the model, and its own forward is never called."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_the_called_module_that_holds_every_parameter_is_the_model():
    model = Whole(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2))
    assert targets(ids(model), model) == [model]
    assert targets(ids(model.decoder), model) == [model]
    assert targets(ids(model.decoder), model.decoder) == [model.decoder]


def test_the_smallest_module_that_holds_every_parameter_is_the_model_if_parts_are_called():
    model = Whole(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2), other=nn.Linear(1, 1))
    both = Whole(encoder=model.encoder, decoder=model.decoder)
    assert targets(ids(model.encoder, model.decoder), model.encoder) == [both]


def test_a_parent_that_adds_no_parameters_names_the_whole():
    whole = Whole(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert targets(ids(whole), whole.net) == [whole]
    wider = Whole(net=nn.Linear(2, 2), teacher=nn.Linear(2, 2))
    assert targets(ids(wider.net), wider.net) == [wider.net]


def test_two_parents_of_one_module_are_not_the_model():
    net = nn.Linear(2, 2)
    parents = [Whole(net=net), Whole(net=net)]
    assert targets(ids(net), net) == [net]
    assert len(parents) == 2


def test_networks_without_a_common_module_are_separate_models():
    encoder, decoder = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 3))
    found = targets(ids(encoder, decoder), encoder)
    assert {id(module) for module in found} == {id(encoder), id(decoder)}


def test_parameters_outside_modules_have_no_model():
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


def test_wrappers_are_removed():
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
    assert leaves(loss).keys() == expected
    assert leaves([loss, loss]).keys() == expected
    assert leaves(x).keys() == {id(x)}
    assert leaves(None) == leaves(torch.ones(1)) == {}


# -- with a training ---------------------------------------------------------------------------------------------------------


def test_layer_names_start_at_a_root_that_is_never_called(tmp_path):
    with watched(tmp_path) as run:
        whole = Whole(net=Net(nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(whole.parameters())
        train(whole.net, optimizer)
    assert (run.names, run.gradients()) == (["Whole"], {"net.0.weight", "net.0.bias"})


def test_a_frozen_backbone(tmp_path):
    with watched(tmp_path) as run:
        model = Net(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        train(model, torch.optim.SGD(model[2].parameters()))
    assert (run.names, run.gradients(), run.steps()) == (["Net"], {"2.weight", "2.bias"}, 3)


def test_a_student_and_its_teacher(tmp_path):
    with watched(tmp_path) as run:
        teacher, student = nn.Linear(4, 2), Net(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(student.parameters())
        for _ in range(3):
            x = torch.randn(5, 4)
            with torch.no_grad():
                wanted = teacher(x)
            (student(x) - wanted).square().mean().backward()
            optimizer.step()
    assert (run.names, run.gradients()) == (["Net"], {"0.weight", "0.bias"})


def test_an_encoder_and_a_decoder_of_their_own(tmp_path):
    with watched(tmp_path) as run:
        encoder, decoder = Net(nn.Linear(4, 3)), Net(nn.Linear(3, 4))
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()])
        for _ in range(3):
            take_step(optimizer, decoder(encoder(torch.randn(5, 4))).square().mean())
    assert len(set(run.names)) == 2
    assert [run.steps(0), run.steps(1)] == [3, 3]


@pytest.mark.parametrize("wrap_first", [False, True], ids=["optimizer-first", "wrapper-first"])
def test_a_distributed_wrapper(tmp_path, wrap_first, one_rank):
    with watched(tmp_path / "run") as run:
        model = Net(nn.Linear(4, 2))
        if wrap_first:
            wrapped = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(wrapped.parameters())
        else:
            optimizer = torch.optim.SGD(model.parameters())
            wrapped = nn.parallel.DistributedDataParallel(model)
        train(wrapped, optimizer)
    assert (run.names, run.gradients(), run.steps()) == (["Net"], {"0.weight", "0.bias"}, 3)


def test_sharpness_aware_minimisation(tmp_path):
    """An optimizer that delegates its steps to another optimizer of the same parameters."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        def step(self, closure: object = None) -> None:
            self.base.step()

    with watched(tmp_path) as run:
        model = Net(nn.Linear(4, 2))
        train(model, Sam(model.parameters()), steps=4)
    assert (run.names, run.seen.optimizers) == (["Net"], 2)
    assert run.steps() in (4, 8)


def copied(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def train_with_masters(
    model: nn.Module, masters: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3, width: int = 4
) -> None:
    """Train a few steps on noise, with optimizers of the master copy's parameters."""
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, width).to(next(model.parameters()).dtype)).float().square().mean().backward()
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        model.load_state_dict(masters.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_in_a_separate_module(tmp_path, dtype):
    with watched(tmp_path) as run:
        masters = Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model = copied(masters, dtype)
        train_with_masters(model, masters, torch.optim.AdamW(masters.parameters()), steps=6)
    assert (run.names, run.gradients(), run.steps()) == (["Net"], {"0.weight", "0.bias", "2.weight", "2.bias"}, 6)
    assert "master copies of the weights of another model" in " ".join(run.seen.notes)
    session = run.parts.models[0].session
    (optimizer,) = session.precision.optimizers
    assert (optimizer.type, optimizer.masters, optimizer.steps) == ("AdamW", 49, {"float32": 49})
    accused = {finding.id for finding in analyse(session).findings if finding.severity != "info"}
    assert accused <= {"scaler-missing-in-float16"}


def test_masters_in_a_module_stepped_by_two_optimizers(tmp_path):
    with watched(tmp_path) as run:
        masters = Net(nn.Linear(4, 8), nn.Linear(8, 1))
        model = copied(masters)
        optimizers = (torch.optim.SGD(part.parameters(), lr=0.1) for part in masters)
        train_with_masters(model, masters, *optimizers)
    assert set(run.names) == {"Net.0", "Net.1"}
    assert [run.steps(number) for number in range(2)] == [3, 3]


def test_masters_in_a_module_of_a_wrapper_and_of_a_gan(tmp_path):
    with watched(tmp_path) as run:
        nets = [Whole(net=nn.Linear(4, 4)), Whole(net=nn.Linear(4, 1))]
        generator, discriminator = (copied(net) for net in nets)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(3):
            made = generator.net(torch.randn(5, 4, dtype=torch.bfloat16))
            for number, half, given in ((1, discriminator, made.detach()), (0, generator, made)):
                half.zero_grad()
                discriminator.net(given).float().square().mean().backward()
                for parameter, master in zip(half.parameters(), nets[number].parameters(), strict=True):
                    master.grad = parameter.grad.float()
                optimizers[number].step()
                half.load_state_dict(nets[number].state_dict())
    assert len(run.names) == 2
    assert [run.gradients(number) for number in range(2)] == [{"net.weight", "net.bias"}] * 2


def test_masters_in_two_modules_of_one_optimizer(tmp_path):
    with watched(tmp_path) as run:
        encoder, decoder = Net(nn.Linear(4, 3)), Net(nn.Linear(3, 4))
        halves = copied(encoder), copied(decoder)
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        for _ in range(3):
            halves[1](halves[0](torch.randn(5, 4, dtype=torch.bfloat16))).float().square().mean().backward()
            for half, masters in zip(halves, (encoder, decoder), strict=True):
                for parameter, master in zip(half.parameters(), masters.parameters(), strict=True):
                    master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            for half, masters in zip(halves, (encoder, decoder), strict=True):
                half.load_state_dict(masters.state_dict())
    assert len(run.names) == 2
    for model in run.parts.models:
        assert model.session.progress.steps == 3
        assert not [str(finding) for finding in analyse(model.session).findings if finding.severity != "info"]


@pytest.mark.parametrize("other", ["other values", "same dtype", "two copies"])
def test_other_modules_are_not_taken_for_master_copies(tmp_path, other):
    with watched(tmp_path) as run:
        owner = Net(nn.Linear(4, 8), nn.Linear(8, 1))
        model = copied(owner, torch.float32 if other == "same dtype" else torch.bfloat16)
        if other == "other values":
            nn.init.ones_(model[0].weight)
        models = [model, copied(model)] if other == "two copies" else [model]
        torch.optim.SGD(owner.parameters(), lr=0.1)
        kept = torch.optim.SGD(owner.parameters(), lr=0.1)
        for _ in range(3):
            sum(each(torch.randn(5, 4, dtype=each[0].weight.dtype)).float().mean() for each in models).backward()
            kept.step()
    assert run.names == []


def test_a_model_whose_forward_method_is_called_directly(tmp_path):
    with watched(tmp_path) as run:
        model = Of(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(4, 2)))
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(3):
            scaler.scale(model.forward(torch.randn(5, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert (run.names, run.gradients(), run.steps()) == (["Of"], {"weight"}, 3)
    assert [change.scale for change in run.parts.models[0].session.progress.scales] == [4.0]


# -- names -------------------------------------------------------------------------------------------------------------------


def names_in(script: str, tmp_path: Path) -> list[str]:
    """Return the names of the models of a script that runs as ``__main__``, with global variables."""
    code = compile(textwrap.dedent(script), "train.py", "exec")
    with watched(tmp_path) as run:
        exec(code, {"__name__": "__main__", "torch": torch, "nn": nn, "train": train})
    folders = {str(Path(model.log_dir).relative_to(tmp_path)) for model in run.parts.models}
    assert folders == set(run.names)
    assert run.seen.models == len(run.names)
    return run.names


GAN = """
    for _ in range(2):
        fake = {0}(torch.randn(5, 4))
        {1}(fake.detach()).mean().backward()
        o[1].step()
        {1}(fake).mean().backward()
        o[0].step()
"""


def gan(first: str, second: str) -> str:
    return textwrap.dedent(GAN).format(first, second)


def test_models_of_torchs_own_classes_are_named_after_variables(tmp_path):
    script = """
        G, D = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))
        both = [G, D]
        o = [torch.optim.SGD(each.parameters(), 0.1) for each in both]
    """
    assert sorted(names_in(textwrap.dedent(script) + gan("G", "D"), tmp_path)) == ["D", "G"]


def test_models_of_one_class_are_named_after_their_variables(tmp_path):
    script = """
        class Mlp(nn.Sequential): ...
        def optimizer_of(model):
            return torch.optim.SGD(model.parameters(), 0.1)
        def main():
            G, D = Mlp(nn.Linear(4, 4)), Mlp(nn.Linear(4, 1))
            o = [optimizer_of(G), optimizer_of(D)]
    """
    loop = textwrap.indent(gan("G", "D"), "    ")
    assert sorted(names_in(textwrap.dedent(script) + loop + "\nmain()", tmp_path)) == ["D", "Mlp"]


def test_models_of_an_object_are_named_after_its_attributes(tmp_path):
    script = """
        class Gan:
            def __init__(self):
                self.generator, self.critic = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1)
                self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.generator, self.critic)]
        gan = Gan()
        o = gan.optimizers
    """
    script = textwrap.dedent(script) + gan("gan.generator", "gan.critic")
    assert sorted(names_in(script, tmp_path)) == ["critic", "generator"]


def test_variables_of_closures_precede_those_of_comprehensions(tmp_path):
    script = """
        def main():
            G, D = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))
            o = [torch.optim.SGD(each.parameters(), 0.1) for each in (G, D)]
            def train():
    """
    loop = textwrap.indent(gan("G", "D"), " " * 8)
    assert sorted(names_in(textwrap.dedent(script) + loop + "\n    train()\nmain()", tmp_path)) == ["D", "G"]


def test_models_in_a_list_are_named_by_the_list_and_their_index(tmp_path):
    script = """
        nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
        o = []
        for net in nets:
            o.append(torch.optim.SGD(net.parameters(), 0.1))
    """
    assert sorted(names_in(textwrap.dedent(script) + gan("nets[0]", "nets[1]"), tmp_path)) == ["nets.0", "nets.1"]


def test_parts_of_a_larger_model_have_their_path(tmp_path):
    script = """
        class ActorCritic(nn.Module):
            def __init__(self):
                super().__init__()
                self.actor, self.critic = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1)
        agent = ActorCritic()
        o = [torch.optim.SGD(agent.actor.parameters(), 0.1), torch.optim.SGD(agent.critic.parameters(), 0.1)]
        parallel = nn.DataParallel(agent)
    """
    script = textwrap.dedent(script) + gan("agent.actor", "agent.critic")
    assert sorted(names_in(script, tmp_path)) == ["ActorCritic.actor", "ActorCritic.critic"]


def test_a_model_built_again_has_the_next_number(tmp_path):
    script = """
        kept = []
        for fold in range(3):
            model = nn.Sequential(nn.Linear(4, 1))
            train(model, torch.optim.SGD(model.parameters(), 0.1))
            kept.append((fold, model))
    """
    assert names_in(script, tmp_path) == ["model", "model-2", "model-3"]


def test_reading_a_scripts_variables_changes_no_variable_and_holds_no_reference():
    def script() -> tuple[dict[str, object], dict[int, str], object]:
        model = nn.Linear(2, 2)
        found = names_of({id(model)}, (nn.Module,))
        gone = weakref.ref(model)
        del model
        return {}, found, gone()

    def with_locals() -> dict[str, object]:
        first = locals()
        model = nn.Linear(2, 2)
        names_of({id(model)}, (nn.Module,))
        return first

    _, found, left = script()
    assert (list(found.values()), left) == (["model"], None)
    assert with_locals() == {}


# -- parameters outside modules ----------------------------------------------------------------------------------------------


def test_a_parameter_outside_the_module_is_reported_separately(tmp_path):
    with watched(tmp_path) as run:
        model, temperature = Net(nn.Linear(4, 2)), nn.Parameter(torch.tensor(0.5))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        for _ in range(5):
            take_step(optimizer, (model(torch.randn(5, 4)) * temperature).square().mean())
    assert run.names == ["Net", "Parameters"]
    assert [run.steps(number) for number in range(2)] == [5, 5]
    assert run.gradients(0) == {"0.weight", "0.bias"}
    assert len(run.gradients(1)) == 1
    session = run.parts.models[1].session
    assert (session.info.model, run.seen.models, session.notes) == ("Parameters", 2, ())
    assert {info.kind for info in session.watched} == {"weight_gradient"}


def test_a_parameter_outside_two_networks(tmp_path):
    script = """
        image, text = nn.Linear(4, 3), nn.Linear(4, 3)
        scale = nn.Parameter(torch.tensor(0.5))
        optimizer = torch.optim.AdamW([*image.parameters(), *text.parameters(), scale])
        for _ in range(3):
            (image(torch.randn(5, 4)) * text(torch.randn(5, 4)) * scale).mean().backward()
            optimizer.step()
    """
    assert sorted(names_in(script, tmp_path)) == ["Parameters", "image", "text"]
