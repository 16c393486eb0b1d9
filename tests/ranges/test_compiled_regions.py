"""Code under torch.compile is unchanged by default and named in the report; an option runs it eagerly in sampled steps."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from agreeing_reports import analyse
from models import Of
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import plain_inductor, take_step

import mpinspect
from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.session import Event, Progress, Session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")

KINDS = ("weight_gradient", "activation_gradient", "activation")
STEPS, EVERY = 7, 3


class Block(nn.Module):
    def __init__(self, breaks: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.breaks, self.recomputes = breaks, recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(y)


class Net(nn.Module):
    def __init__(self, breaks: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.head = Block(breaks, recomputes), Block(False, recomputes), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(x)))


class Squashed(nn.Module):
    """A small model that compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Backend:
    """A backend that runs graphs unchanged, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def _whole(net: Net, **options: Any) -> Any:
    return torch.compile(net, **options)


def _fullgraph(net: Net, **options: Any) -> Any:
    return torch.compile(net, fullgraph=True, **options)


def _in_place(net: Net, **options: Any) -> Any:
    net.compile(**options)
    return net


def _regional(net: Net, **options: Any) -> Any:
    net.one.compile(**options)
    net.two.compile(**options)
    return net


def _parts(net: Net, **options: Any) -> Any:
    net.one, net.two = torch.compile(net.one, **options), torch.compile(net.two, **options)
    return net


def _nested(net: Net, **options: Any) -> Any:
    net.one.compile(**options)
    return torch.compile(net, **options)


def _forward(net: Net, **options: Any) -> Any:
    net.forward = torch.compile(net.forward, **options)
    return net


def _function(net: Net, **options: Any) -> Any:
    return torch.compile(lambda x: net(x), **options)


@dataclass(frozen=True)
class Way:
    """A way to compile a net, and the paths of the compiled modules."""

    compile: Callable[..., Any]
    paths: tuple[str, ...] = ("",)
    breaks: bool = False
    net: Callable[[], nn.Module] | None = None


WAYS = {
    "whole": Way(_whole),
    "fullgraph": Way(_fullgraph),
    "in place": Way(_in_place),
    "breaks": Way(_whole, breaks=True),
    "regional": Way(_regional, ("one", "two")),
    "parts wrapped": Way(_parts, ("one", "two")),
    "nested": Way(_nested),
    "forward": Way(_forward),
    "function": Way(_function),
}
#: The step before which the inspector is attached; None: before the net is compiled.
ATTACHED = {"before": None, "after": 0, "in the middle": 2}
#: The common ways are attached at each moment, the others at one moment each; every other one samples every step.
CELLS = [(name, attached) for name in ("whole", "fullgraph", "breaks", "regional") for attached in ATTACHED]
CELLS += zip(
    ("in place", "parts wrapped", "nested", "forward", "function"), ("before", "in the middle", *ATTACHED), strict=True
)
CELLS = [(*cell, (1, EVERY)[number % 2]) for number, cell in enumerate(CELLS)]


@dataclass
class Run:
    """The losses of a training, and the weights and batch at the beginning of each step."""

    losses: list[float] = field(default_factory=list)
    begun: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = field(default_factory=list)
    backend: Any = field(default_factory=Backend)
    session: Session | None = None


def _train(way: Way, attached: str | None = None, backend: Any = None, **options: Any) -> Run:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net, run = way.net() if way.net is not None else Net(way.breaks), Run(backend=backend or Backend())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    at = ATTACHED[attached] if attached is not None else STEPS
    inspector = Inspector(net, optimizers=optimizer, **options)
    if at is None:
        inspector.attach()
    call = way.compile(net, backend=run.backend)
    for step in range(STEPS):
        if step == at:
            inspector.attach()
        batch = torch.randn(5, 4)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        run.begun.append(({name.replace("_orig_mod.", ""): value for name, value in state.items()}, batch))
        loss = call(batch).square().sum()
        take_step(optimizer, loss)
        run.losses.append(loss.item())
    inspector.detach()
    run.session = inspector.session()
    return run


_ALONE: dict[str, Run] = {}


def _alone(name: str) -> Run:
    """Return the cached training of a way without an inspector."""
    if name not in _ALONE:
        _ALONE[name] = _train(WAYS[name])
    return _ALONE[name]


def _eager_counts(run: Run, steps: list[int], net: nn.Module | None = None) -> dict[Any, Any]:
    """Return the counts of these steps, computed by an uncompiled net from the same weights and batches."""
    net = net or Net()
    with Inspector(net, capture=KINDS, watch=False) as inspector:
        for step in steps:
            state, batch = run.begun[step]
            net.load_state_dict(state)
            net.zero_grad()
            net(batch).square().sum().backward()
    return {key: tensor.histogram for key, tensor in inspector.session().totals().items()}


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.parametrize(("name", "attached", "every"), CELLS)
def test_a_compiled_training_is_unchanged_by_default(name: str, attached: str, every: int) -> None:
    """The losses and graphs equal those without an inspector; a note names the modules with only weight gradients counted."""
    way, alone = WAYS[name], _alone(name)
    run = _train(way, attached, every=every)
    assert run.losses == alone.losses
    assert (run.backend.graphs, run.backend.calls) == (alone.backend.graphs, alone.backend.calls)
    session = run.session
    assert (session.progress.compiled, session.progress.eager_steps) == (way.paths, None)
    assert {key.name for key in session.totals()} >= {"one.up.weight", "two.down.bias", "head.weight"}
    assert not [key for key in session.totals() if key.name == "one.up"]
    where = "the compiled model" if way.paths == ("",) else "the compiled modules 'one', 'two'"
    (note,) = session.notes
    assert f"inside {where} only weight gradients" in note
    assert "eager_samples=True" in note


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.parametrize(("name", "attached", "every"), [cell for cell in CELLS if cell[0] != "function"])
def test_sampled_steps_run_eagerly(name: str, attached: str, every: int) -> None:
    """Their counts equal an uncompiled net's with the same weights; the other steps run the compiled graphs."""
    way, alone = WAYS[name], _alone(name)
    run = _train(way, attached, every=every, capture=KINDS, eager_samples=True)
    first = ATTACHED[attached] or 0
    sampled = [step for step in range(first, STEPS) if (step - first) % every == 0]
    # Code that is compiled after attaching is found after its first step.
    eager = sampled[1:] if attached == "before" else sampled
    assert (run.session.progress.sampled_steps, run.session.progress.eager_steps) == (len(sampled), len(eager))
    # This backend computes exactly as eager code.
    assert run.losses == alone.losses
    # If every step runs eagerly, torch compiles no graph.
    assert run.backend.graphs == (alone.backend.graphs if len(eager) < STEPS else 0)
    assert run.backend.calls * STEPS == alone.backend.calls * (STEPS - len(eager))
    counts = {key: tensor.histogram for key, tensor in run.session.totals().items()}
    inside = {key: counted for key, counted in _eager_counts(run, eager).items() if key.kind != "weight_gradient"}
    assert {(key.name, key.kind) for key in inside} >= {("one.up", "activation"), ("two.down", "activation_gradient")}
    if attached != "before":
        assert counts == _eager_counts(run, eager)
    else:
        regional = way.paths == ("one", "two")
        assert all(counts[key] == counted for key, counted in inside.items() if not regional or key.name != "head")
        assert f"1 of {len(sampled)} sampled steps did not run eagerly" in run.session.notes[0]


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_steps_between_samples_run_inductors_graphs() -> None:
    compiled = Way(lambda net, backend: torch.compile(net, backend="inductor", mode="reduce-overhead"), net=Squashed)
    with plain_inductor():
        alone = _train(compiled)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for attached in ATTACHED:
            for every in (1, EVERY):
                assert _train(compiled, attached, every=every).losses == alone.losses
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        run = _train(compiled, "after", every=EVERY, capture=KINDS, eager_samples=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.session.progress.eager_steps == 3
    counts = {key: tensor.histogram for key, tensor in run.session.totals().items()}
    assert counts == _eager_counts(run, [0, 3, 6], Squashed())


# -- code that must not run eagerly --------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield Backend()
    torch._dynamo.reset()


def test_only_training_calls_of_the_model_itself_run_eagerly(backend: Backend) -> None:
    """Validation, another model and a compiled loss still run compiled."""
    net, other, beside = Net(), Net(), Backend()
    call, others = torch.compile(net, backend=backend), torch.compile(other, backend=beside)
    loss = torch.compile(lambda x: x.square().sum(), backend=beside)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Inspector(net, optimizers=optimizer, eager_samples=True) as inspector:
        for step in range(1, 4):
            loss(call(torch.randn(5, 4)) + others(torch.randn(5, 4))).backward()
            assert (backend.calls, beside.calls) == (step - 1, 2 * step)
            net.eval()
            with torch.no_grad():
                call(torch.randn(5, 4))
            net.train()
            assert backend.calls == step
            optimizer.step()
    assert inspector.session().progress.eager_steps == 3


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
@pytest.mark.parametrize("stance", ["eager_on_recompile", "fail_on_recompile"])
def test_a_compiler_stance_set_by_the_user_has_priority(stance: Any, backend: Backend) -> None:
    net = Net()
    call = torch.compile(net, backend=backend)
    call(torch.randn(5, 4)).sum().backward()
    with torch.compiler.set_stance(stance), Inspector(net, eager_samples=True) as inspector:
        call(torch.randn(5, 4)).sum().backward()
        assert torch._dynamo.eval_frame._stance.stance == stance
    assert (backend.calls, inspector.session().progress.eager_steps) == (2, 0)
    assert "a stance of torch.compiler was set" in inspector.session().notes[0]


def test_activations_are_counted_under_the_stance_force_eager(backend: Backend) -> None:
    net = Net()
    net.one.compile(backend=backend)
    with torch.compiler.set_stance("force_eager"), Inspector(net, capture=KINDS) as inspector:
        net(torch.randn(5, 4)).sum().backward()
    assert not inspector.session().notes
    assert not inspector.session().progress.compiled
    assert any(key.name == "one.up" and key.kind == "activation" for key in inspector.session().totals())


def test_a_wrapper_compiled_for_validation_alone_hides_no_training(backend: Backend) -> None:
    """The model itself trains uncompiled."""
    net = Net()
    call = torch.compile(net, backend=backend)
    with Inspector(net, capture=KINDS) as inspector:
        for _ in range(3):
            net(torch.randn(5, 4)).sum().backward()
            with torch.no_grad():
                call(torch.randn(5, 4))
    assert backend.calls == 3
    assert (inspector.session().notes, inspector.session().progress.compiled) == ((), ())


def test_checkpointing_around_compiled_code_keeps_it_compiled(backend: Backend) -> None:
    """Checkpointing compares saved tensors, so an eager forward with a compiled recomputation would raise an error."""
    net = Net()
    net.one.compile(backend=backend)
    said = pytest.warns(mpinspect.MpinspectWarning, match="under activation checkpointing")
    with said, Inspector(net, capture=KINDS, eager_samples=True) as inspector:
        net.head(checkpoint(net.one, torch.randn(5, 4, requires_grad=True), use_reentrant=False)).sum().backward()
    assert (backend.calls, inspector.session().progress.eager_steps) == (2, 0)


def test_checkpointing_inside_compiled_code_runs_eagerly(backend: Backend) -> None:
    net = Net(recomputes=True)
    call = torch.compile(net, backend=backend)
    with Inspector(net, capture=KINDS, eager_samples=True) as inspector:
        call(torch.randn(5, 4)).sum().backward()
    totals = {(key.name, key.kind): tensor for key, tensor in inspector.session().totals().items()}
    assert backend.calls == 0
    # 5 rows of 8, without the recomputation.
    assert (
        totals["one.up", "activation"].histogram.total == totals["one.up", "activation_gradient"].histogram.total == 40
    )


# -- attaching, detaching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks_off", [False, True])
def test_detaching_restores_the_compiled_functions(breaks_off: bool, backend: Backend) -> None:
    net = Net()
    net.one.compile(backend=backend)
    net.two.forward = torch.compile(net.two.forward, backend=backend)
    whole = torch.compile(net, backend=backend)
    holders = [(net.one, "_compiled_call_impl"), (net.two, "forward"), (whole, "forward")]
    before = [vars(module)[name] for module, name in holders]
    inspector = Inspector(net, eager_samples=True).attach()
    assert all(vars(module)[name] is not known for (module, name), known in zip(holders, before, strict=True))
    if breaks_off:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            whole(torch.randn(5, 3))
    copied = copy.deepcopy(net)
    inspector.detach()
    assert all(vars(module)[name] is known for (module, name), known in zip(holders, before, strict=True))
    assert copied.one._compiled_call_impl is None
    whole(torch.randn(5, 4))
    assert backend.calls > 0


def test_two_inspectors_of_one_model_sample_independently(backend: Backend) -> None:
    """A step runs eagerly if one of them samples it; each detaches only its own wrapper."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.compile(backend=backend)
    compiled = net._compiled_call_impl
    first = Inspector(net, optimizers=optimizer, every=2, eager_samples=True).attach()
    second = Inspector(net, optimizers=optimizer, every=3, eager_samples=True).attach()
    for _ in range(6):
        net(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    first.detach()
    assert net._compiled_call_impl is not compiled
    net(torch.randn(5, 4)).sum().backward()
    second.detach()
    assert net._compiled_call_impl is compiled
    # Neither samples steps 1 and 5. The second samples step 6, which does not finish.
    assert backend.calls == 2
    assert [each.session().progress.eager_steps for each in (first, second)] == [3, 2]


def test_a_compiled_module_around_the_model_and_its_loss_runs_eagerly(backend: Backend) -> None:
    """The outer module is created after the inspector, and the model has no reference to it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inspector = Inspector(net, optimizers=optimizer, capture=KINDS, eager_samples=True).attach()
    call = torch.compile(Of(lambda self, x: self.net(x).square().sum(), net=net), backend=backend)
    for _ in range(3):
        call(torch.randn(5, 4)).backward()
        optimizer.step()
    with pytest.warns(mpinspect.MpinspectWarning, match="1 of 3 sampled steps did not run eagerly"):
        inspector.detach()
    assert (backend.graphs, backend.calls, inspector.session().progress.eager_steps) == (1, 1, 2)


@pytest.mark.parametrize("every", [1, 2])
def test_calls_of_compiled_code_begin_steps_without_an_optimizer(every: int, backend: Backend) -> None:
    """This holds in eager and compiled steps."""
    net = Net()
    call = torch.compile(net, backend=backend)
    with Inspector(net, every=every, eager_samples=True) as inspector:
        for _ in range(4):
            for _ in range(2):
                call(torch.randn(5, 4)).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    progress = inspector.session().progress
    assert (progress.steps, progress.backwards) == (4, 8)
    assert progress.sampled_steps == progress.eager_steps == 4 // every
    assert backend.calls == 8 - 2 * progress.eager_steps


# -- infinities and NaNs -------------------------------------------------------------------------------------------------


class Rooted(nn.Module):
    """Takes square roots; their backward is NaN if ``shift`` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sqrt(self.first(x) * 0 + self.shift))


def _broken_in_step_two(backend: Backend, **options: Any) -> RangeReport:
    net = Rooted()
    call = torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inspector = Inspector(net, optimizers=optimizer, **options).attach()
    for step in range(3):
        if step == 2:
            net.shift.zero_()
        call(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    inspector.detach()
    return inspector.report()


@pytest.mark.filterwarnings("ignore::mpinspect.MpinspectWarning")
def test_a_nan_in_compiled_code_has_an_unknown_place(backend: Backend) -> None:
    report = _broken_in_step_two(backend)
    (event,) = report.events
    assert (event.step, event.what, event.module, event.forward_finite) == (2, "weight_gradient", "first", True)
    assert "no call of it was seen (in torch.compile, or" in event.explanation
    # This backend leaves autograd's nodes, which lead to the operation.
    assert report.findings[0].evidence["operator"].startswith("a square root of zero")
    # Inductor leaves none.
    others = analyse(replace(report.session, measurements=())).findings
    finding = next(finding for finding in others if finding.id == "non-finite-event")
    assert "eager_samples=True" in finding.fix
    assert "emulate_precision_casts" in finding.fix
    reasons = {reason for _, kind, reason in report.coverage.never_fired if kind == "activation_gradient"}
    assert reasons == {"inside torch.compile, where no hook runs"}


def test_the_culprit_is_named_in_a_step_that_ran_eagerly(backend: Backend) -> None:
    report = _broken_in_step_two(backend, eager_samples=True)
    (event,) = report.events
    assert (event.step, event.what, event.forward_finite) == (2, "activation_gradient", True)
    assert "own code" in event.explanation
    assert "3 sampled (3 of them run eagerly instead of compiled)" in " ".join(str(report).split())


def test_a_compiled_module_hides_its_submodules() -> None:
    progress = Progress(compiled=("net.one",))
    assert [progress.hides(path) for path in ("net.one", "net.one.up", "net.ones", "net", "")] == [True, True] + [
        False
    ] * 3
    assert Progress(compiled=("",)).hides("anything")
    assert not Progress().hides("")
    assert Event(0, 0, "backward", "", "weight_gradient", "", "nan").forward_finite is None
