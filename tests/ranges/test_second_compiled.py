"""Inspector(second=...) on compiled code: its eager form is computed twice, and the training stays."""

import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from models import Of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from trainings import plain_inductor

import mpinspect
from mpinspect.ranges.faults.measure import repeats
from mpinspect.ranges.faults.measure.optimizer_arithmetic import WholeStep
from mpinspect.runtime import compiled_graphs
from mpinspect.runtime.compiled_graphs import KEEPING

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")


class Scatter(nn.Module):
    """Adds 600 rows up in one of BF16, where a sum stops at 256."""

    def forward(self, x):
        return torch.zeros(2, 8, dtype=x.dtype).index_put((torch.zeros(600, dtype=torch.long),), x, accumulate=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop, self.hub = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), Scatter()

    def forward(self, x):
        return self.hub(self.drop(self.norm(self.fc(x)).sigmoid()))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList([Block()]), nn.Linear(8, 3)

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(output):
    return output.float().square().mean()


def linear_then(function):
    """Return what makes a network of one linear layer, whose output goes through the function."""
    return lambda: Of(lambda self, x: function(self.fc(x)), fc=nn.Linear(8, 8))


class Training:
    """Trains a network; ``compiles`` changes its model, its forward, its loss or its step."""

    def __init__(self, compiles, network=Network):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.model = network()
        self.forward, self.loss, self.step = self.model, loss_of, self._step
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        compiles(self)

    def _step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.forward(torch.randn(600, 8)))
        loss.backward()
        return loss

    def trained(self, steps=3, **options):
        self.inspector = mpinspect.Inspector(self.model, **options)
        with self.inspector:
            self.losses = []
            for _ in range(steps):
                self.losses.append(self.step().item())
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
        self.random = torch.get_rng_state()
        self.compiled = {name: dict(counters[name]) for name in ("stats", "recompiles")}
        return self

    def found(self, fault):
        return [each for each in self.inspector.report().findings if each.id == fault]


def whole(training, backend="aot_eager"):
    training.forward = torch.compile(training.model, backend=backend)


def in_place(training):
    training.model.compile(backend="aot_eager")


def block(training):
    training.model.blocks[0] = torch.compile(training.model.blocks[0], backend="eager")


def function(training):
    model = training.model
    training.forward = torch.compile(lambda x: model(x), backend="aot_eager")


def loss(training):
    training.loss = torch.compile(loss_of, backend="aot_eager")


def whole_step(training):
    training.step = torch.compile(training._step, backend="eager")


WAYS = [whole, partial(whole, backend="eager"), in_place, block, function, loss, whole_step]
NAMES = ["aot_eager", "eager", "in_place", "block", "function", "loss", "whole_step"]


@pytest.mark.parametrize("compiles", WAYS, ids=NAMES)
def test_the_eager_form_is_computed_twice_and_nothing_changes(compiles):
    plain, training = Training(compiles).trained(), Training(compiles).trained(second=[1])
    assert training.losses == plain.losses
    for mine, plains in zip(training.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(mine, plains)
    assert torch.equal(training.random, plain.random)
    assert torch._C._len_torch_dispatch_stack() == 0
    if compiles is not whole_step:  # there the compiler also compiles hooks of the capture
        assert training.compiled == plain.compiled
    (finding,) = training.found("sum-loses-terms")
    assert (finding.layer, finding.step) == ("blocks.0.hub", 1)
    (record,) = [each for each in training.inspector.session().measurements if each.what == "second-lost-sum"]
    assert record.names[1].startswith("test_second_compiled.py:")
    assert "index_put" in record.sources[record.names[1]]
    assert record.figures["gradients_error"] > 0.1
    assert not any("Left out" in note for note in training.inspector.session().notes)


def test_inductor_trains_alike():
    inductor = partial(whole, backend="inductor")
    with plain_inductor():
        plain, training = (Training(inductor).trained(second=second) for second in (False, [1]))
    assert training.losses == plain.losses
    assert training.compiled == plain.compiled
    for mine, plains in zip(training.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(mine, plains)
    assert torch.equal(training.random, plain.random)
    assert [(each.layer, each.step) for each in training.found("sum-loses-terms")] == [("blocks.0.hub", 1)]
    assert not any("Left out" in note for note in training.inspector.session().notes)


def test_an_infinity_that_inductor_avoids_is_not_reported():
    network = linear_then(lambda output: output.half() * 60000 + output)
    with plain_inductor():
        plain, training = (
            Training(partial(whole, backend="inductor"), network).trained(second=second) for second in (False, [1])
        )
    assert training.losses == plain.losses
    assert all(map(math.isfinite, training.losses))
    assert not [each for each in training.inspector.session().measurements if each.what == "second-born"]


def overflowing():
    outer, inner = Block(), Of(lambda self, x: (x.half() * 3000 * 3000).float().tanh())
    outer.hub = nn.Linear(8, 8)
    return nn.Sequential(OrderedDict(outer=outer, inner=nn.Sequential(OrderedDict(scale=inner))))


def test_an_overflow_in_a_compiled_block_is_named():
    training = Training(whole, overflowing).trained(second=[1])
    records = [each for each in training.inspector.session().measurements if each.what == "second-born"]
    assert [(each.name, each.names[0], each.names[2]) for each in records] == [("inner.scale", "mul", "forward")]


def test_an_infinity_that_the_backend_avoids_is_not_reported():
    def fused(graph, inputs):
        return lambda *args: [each.nan_to_num(0.0, 1.0, -1.0) for each in graph(*args)]

    network = linear_then(lambda output: output.half() * 60000 * 60000)
    training = Training(partial(whole, backend=fused), network).trained(second=[1])
    assert not [each for each in training.inspector.session().measurements if each.what == "second-born"]


@pytest.mark.parametrize("avoids", [True, False])
def test_an_infinity_of_the_backward_is_reported_unless_the_backend_avoids_it(avoids):
    def finite(graph, inputs):
        return make_boxed_func(
            lambda *args: [each if each is None else each.nan_to_num(0.0, 1.0, -1.0) for each in graph(*args)]
        )

    def compiles(training):
        backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=finite)
        whole(training, backend if avoids else "aot_eager")
        training.loss = lambda output: output.float().sum() * 1e3

    training = Training(compiles, linear_then(lambda output: output.half() * 100)).trained(second=[1])
    records = [each for each in training.inspector.session().measurements if each.what == "second-born"]
    # The step that was asked for, and the one after the event that its loss, which is read, shows to be the backward's.
    assert [(each.step, each.names[2]) for each in records] == ([] if avoids else [(1, "backward"), (2, "backward")])


def test_a_buffer_that_unrepeated_code_overwrites_is_exact(monkeypatch):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8, dtype=torch.bfloat16))

        def forward(self, x):
            y = self.fc(x)
            with torch.no_grad():
                self.mean.add_(y.mean(0) / 3)  # gives the buffer a twin
                self.replace(y)
            return y

        def replace(self, y):
            self.mean.copy_(self.mean.flip(0) + y[0])

    def compiles(training):
        training.model.replace = torch.compile(training.model.replace, backend="aot_eager")

    twins, records = [], WholeStep.records

    def ended(second):
        twins.append(second.twin(training.model.mean))
        return records(second)

    monkeypatch.setattr(WholeStep, "records", ended)
    training = Training(compiles, Averaging)
    training.trained(second=[1])
    assert twins == [None]


def test_other_random_numbers_of_the_backend_are_not_an_error():
    def chosen(output):
        return (output.gather(-1, output.argmax(-1, keepdim=True)).float() - output.float()).square().mean()

    def compiles(training):
        whole(training, lambda graph, inputs: lambda *args: (torch.rand(1), graph(*args))[1])
        training.loss = chosen

    training = Training(compiles, lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))).trained(second=[1])
    assert {each.what for each in training.inspector.session().measurements if "second" in each.what} == {
        "second-gradients",
        "second-lines",
    }


def test_a_result_that_the_loss_does_not_have_is_left_out():
    class Twofold(Network):
        def forward(self, x):
            x = super().forward(x)
            return x, x + 1

    def compiles(training):
        whole(training)
        training.loss = lambda outputs: loss_of(outputs[0])

    training = Training(compiles, Twofold).trained(second=[1])
    assert training.found("sum-loses-terms")
    assert not any("Left out" in note for note in training.inspector.session().notes)


def test_a_failure_costs_the_graph_alone(monkeypatch):
    plain = Training(whole).trained()
    monkeypatch.setattr(repeats._Eager, "run_node", lambda *_: 1 / 0)
    training = Training(whole).trained(second=[1])
    assert training.losses == plain.losses
    notes = [each for each in training.inspector.session().notes if "ZeroDivisionError" in each]
    assert len(notes) == 1


def test_an_error_within_an_autocast_leaves_it(monkeypatch):
    class Inside(Block):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    operators = []

    training = Training(whole, Inside)
    original = repeats._Eager.call_function

    def counted(self, target, args, kwargs):
        operators.append(target)
        if len(operators) == 3:
            raise ValueError
        return original(self, target, args, kwargs)

    monkeypatch.setattr(repeats._Eager, "call_function", counted)
    training.trained(second=[1])
    assert len(operators) == 3
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def _compiled_before(training, monkeypatch):
    monkeypatch.setattr(KEEPING, "_kept", 0)
    training.step()


def _without_names(training, monkeypatch):
    monkeypatch.setattr(compiled_graphs, "_source", lambda argument: argument.meta["missing"])


def _of_older_torch(training, monkeypatch):
    monkeypatch.setattr(compiled_graphs, "_COMPILES_IN_MODES", False)


@pytest.mark.parametrize("hides", [_compiled_before, _without_names, _of_older_torch])
def test_code_compiled_out_of_sight_is_noted(monkeypatch, hides):
    training = Training(whole)
    monkeypatch.setattr(KEEPING, "_kept", 0)
    hides(training, monkeypatch)
    training.trained(second=[1])
    assert not training.found("sum-loses-terms")
    assert any("compiled by torch.compile before" in note for note in training.inspector.session().notes)


def test_checkpointed_code_is_computed_twice():
    from torch.utils.checkpoint import checkpoint

    def compiles(training):
        compiled = torch.compile(training.model, backend="aot_eager")
        training.forward = lambda x: checkpoint(compiled, x, use_reentrant=False)

    plain, training = (Training(compiles).trained(second=second) for second in (False, [1]))
    assert training.losses == plain.losses
    assert training.found("sum-loses-terms")

    def inside(training):
        model = training.model
        training.forward = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager")

    plain, training = (Training(inside).trained(second=second) for second in (False, [1]))
    assert training.losses == plain.losses
    assert [each.layer for each in training.found("sum-loses-terms")] == ["blocks.0.hub"]


def test_one_graph_serves_several_blocks():
    class Grown(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("gain", torch.tensor(gain))

        def forward(self, x):
            return (self.fc(x).sigmoid().half() * self.gain.half() * 100).float().tanh()

    def compiles(training):
        for each in training.model:
            each.compile(backend="eager")

    training = Training(compiles, lambda: nn.Sequential(Grown(1.0), Grown(1.0), Grown(1e4))).trained(second=[1])
    assert training.compiled["stats"]["unique_graphs"] == 2  # the first block's input takes no gradient
    records = [each for each in training.inspector.session().measurements if each.what == "second-born"]
    assert [each.name for each in records] == ["2"]


def test_all_steps_that_are_chosen_are_computed_twice():
    training = Training(whole).trained(5, second=[1, 3])
    assert [each.step for each in training.inspector.session().measurements if each.what == "second-lost-sum"] == [1, 3]
