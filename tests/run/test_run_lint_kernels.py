"""``mpinspect run --lint --kernels`` records the products, and a profile, of steps of the script."""

import copy
import pickle
import sys

import pytest
import torch
from models import Of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from trainings import closure_of, take_step
from watched_training import train, watched

from mpinspect.kernels.profile import read_trace
from mpinspect.ranges.records import DividedInHalf, recorded
from mpinspect.run.joining import join
from mpinspect.run.options import LaunchOptions
from mpinspect.run.outcome import Outcome, Recordings, Seen
from mpinspect.runtime.gpus import named
from mpinspect.shapes.analysis import analyse_shapes
from mpinspect.shapes.record.recording import record_matmuls


@pytest.fixture(autouse=True)
def _nothing_was_compiled_before():
    """Clear Dynamo's counters: other tests compile models, and a script that compiles is refused."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


class Attending(nn.Module):
    """A convolution, attention, a functional product and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.eye(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return (x @ self.scale) @ self.embed.weight.T


def products(recording) -> list[tuple]:
    return sorted(
        (one.module, one.role, one.op, one.m, one.n, one.k, one.dtype, one.calls) for one in recording.matmuls
    )


def train_tokens(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> None:
    for _ in range(steps):
        take_step(optimizer, model(torch.randint(0, 11, (3, 7))).square().mean())


def test_the_products_equal_those_of_the_models_lint(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model = Attending()
        train_tokens(model, torch.optim.AdamW(model.parameters()))
    found = run.parts.matmuls
    expected = record_matmuls(model, (torch.zeros(3, 7, dtype=torch.long),), device="real")
    assert products(found) == products(expected)
    assert {one.parameter for one in found.matmuls} == {one.parameter for one in expected.matmuls}
    assert (found.device, found.backward, found.stopped, found.notes) == ("cpu", True, "", ())
    assert _get_current_dispatch_mode() is None
    assert (run.parts.trace, run.seen.notes) == (None, [])
    assert str(analyse_shapes(found, named("hopper"), model="Attending"))


def dropping(self, x: torch.Tensor) -> torch.Tensor:
    """Attend with dropout, which CPUs compute by the math path and GPUs by fused kernels."""
    q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
    y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
    return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("autocast", [torch.bfloat16, None])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_attention_on_a_cpu_is_recorded_as_a_gpu_computes_it(autocast, checkpointed, tmp_path):
    def trained() -> nn.Module:
        torch.manual_seed(3)
        model = Of(dropping, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.randn(2, 64, 64)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            take_step(optimizer, y.float().square().mean())
        return model

    bare = trained()
    with watched(tmp_path, lint=True) as run:
        model = trained()
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), model.parameters(), strict=True))
    found = run.parts.matmuls
    fused = sorted((one.op, one.role, one.recomputed) for one in found.matmuls if one.kind == "attention")
    name = f"aten::_scaled_dot_product_{'flash' if autocast else 'efficient'}_attention"
    again = [(name, "forward", True)] if checkpointed else []
    assert fused == [(name, "forward", False), *again, (f"{name}_backward", "backward", False)]
    assert not [one.op for one in found.matmuls if one.batch > 1 and one.kind != "attention"]
    assert {one.dtype for one in found.matmuls} == {"bfloat16" if autocast else "float32"}
    report = analyse_shapes(found, named("ampere"), model="Dropping")
    assert not {"unfused-attention", "float32-beside-autocast"} & {finding.id for finding in report.findings}
    assert "on A100 (ampere), recorded on a CPU:" in str(report)
    # The model's lint records the same products, on the meta device and on the CPU.
    for device in ("meta", "real"):
        linted = record_matmuls(model, torch.randn(2, 64, 64), dtype=autocast, device=device)
        kinds = sorted((one.op, one.role) for one in linted.matmuls if one.kind == "attention" or one.batch > 1)
        assert kinds == [(name, "forward"), (f"{name}_backward", "backward")]


def test_attention_on_a_cpu_that_no_gpu_would_fuse_has_a_math_path(tmp_path):
    with watched(tmp_path, lint=True) as run:
        layer = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(4):
            x = layer(torch.randn(4, 8, 16))
            nn.functional.scaled_dot_product_attention(x, x, x).square().mean().backward()
            optimizer.step()
    assert {one.math_path for one in run.parts.matmuls.matmuls if not one.parameter} == {"dimensions"}


def test_the_scripts_autocast_is_recorded(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                x = model[0](torch.randn(4, 16))
                with torch.autocast("cpu", enabled=False):
                    loss = model[1](x.float()).square().mean()
            loss.backward()
            optimizer.step()
    by_module = {(one.module, one.role): (one.dtype, one.autocast) for one in run.parts.matmuls.matmuls}
    assert by_module["0", "forward"] == ("bfloat16", True)
    assert by_module["1", "forward"] == ("float32", False)


def test_micro_batches_belong_to_one_step_and_validation_is_excluded(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(torch.randn(64, 4))
            model.train()
    assert {(one.role, one.calls) for one in run.parts.matmuls.matmuls} == {("forward", 3), ("dgrad", 3), ("wgrad", 3)}
    assert {one.m for one in run.parts.matmuls.matmuls if one.role == "forward"} == {5}


def test_the_optimizers_own_products_are_left_out(tmp_path):
    class Multiplying(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    torch.mm(parameter.detach(), parameter.detach().T)
            return super().step(closure)

    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 8, bias=False))
        train(model, Multiplying(model.parameters()), steps=4)
    assert [(one.role, one.m, one.n, one.k) for one in run.parts.matmuls.matmuls] == [
        ("forward", 5, 8, 4),
        ("wgrad", 8, 4, 5),
    ]


def test_products_of_closures_are_not_attributed_to_the_optimizer(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model, x = nn.Sequential(nn.Linear(4, 8)), torch.randn(5, 4)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        for _ in range(3):
            optimizer.step(closure_of(optimizer, lambda: model(x).square().mean()))
    assert {one.role for one in run.parts.matmuls.matmuls} == {"forward", "wgrad"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_of_checkpointing_are_marked_as_recomputed(tmp_path, reentrant):
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            checkpoint(model, torch.randn(5, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
            optimizer.step()
    forwards = [one for one in run.parts.matmuls.matmuls if one.role == "forward"]
    again = {one.module for one in forwards if one.recomputed}
    assert {one.module for one in forwards if not one.recomputed} == {"0", "1"}
    # Non-reentrant recomputation stops once it has the tensors that the backward needs.
    assert again == ({"0", "1"} if reentrant else {"0"})


class Generator(nn.Sequential): ...


class Critic(nn.Sequential): ...


def test_a_gan_is_recorded_under_the_names_of_its_networks(tmp_path):
    with watched(tmp_path, lint=True, kernels=True) as run:
        nets = [Generator(nn.Linear(3, 2)), Critic(nn.Linear(2, 1))]
        optimizers = [torch.optim.Adam(each.parameters()) for each in nets]
        for _ in range(6):
            fake = nets[0](torch.randn(5, 3))
            nets[1](fake.detach()).mean().backward()
            optimizers[1].step()
            nets[1](fake).mean().backward()
            optimizers[0].step()
    assert {one.module for one in run.parts.matmuls.matmuls} == {"Generator.0", "Critic.0"}
    assert run.parts.trace is not None


def test_a_skipped_step_ends_the_recording_too(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for step in range(4):
            loss = model(torch.randn(5, 4)).square().mean()
            take_step(optimizer, loss * float("inf") if step == 1 else loss, scaler)
    assert {one.calls for one in run.parts.matmuls.matmuls} == {1}


def test_skipped_steps_are_noticed_between_sampled_steps(tmp_path):
    with watched(tmp_path, lint=True, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for step in range(10):
            loss = model(torch.randn(5, 4)).square().mean()
            take_step(optimizer, loss * float("inf") if step in (0, 2, 3, 6) else loss, scaler)
    session = run.parts.models[0].session
    assert (session.progress.steps, session.progress.skipped_steps) == (10, 4)
    assert all(event.skipped for event in session.events)
    assert [event.step for event in session.events] in ([0, 6], [0, 2, 6])


def test_a_dispatch_mode_of_the_scripts_own(tmp_path):
    class Counting(TorchDispatchMode):
        operators = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operators += 1
            return func(*args, **(kwargs or {}))

    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        with Counting():
            train(model, optimizer, steps=3)
    assert run.parts.matmuls is None
    assert "dispatch mode of its own" in " ".join(run.seen.notes)
    with watched(tmp_path / "b", lint=True) as run:
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, steps=1)
        with Counting() as counting:
            train(model, optimizer, steps=2)
        assert counting.operators
        train(model, optimizer, steps=2)
    assert _get_current_dispatch_mode() is None


def test_a_step_is_recorded_by_default(tmp_path):
    with watched(tmp_path) as run:
        model = Attending()
        train_tokens(model, torch.optim.AdamW(model.parameters()))
    assert products(run.parts.matmuls) == products(
        record_matmuls(model, (torch.zeros(3, 7, dtype=torch.long),), device="real")
    )
    assert run.seen.notes == []


class Marked(torch.Tensor):
    """A tensor subclass, like quantised weights and shards."""


@pytest.mark.parametrize(
    ("options", "parameter", "steps"),
    [
        ({"lint": False}, torch.randn(2, 4), 4),
        ({"kernels": True}, torch.randn(2, 4), 2),
        ({}, torch.randn(2, 4).as_subclass(Marked), 4),
        ({}, torch.randn(2, 4), 1),
    ],
    ids=["told not to", "a profile was asked for", "a parameter of another class", "a single step"],
)
def test_by_default_an_unrecorded_step_leaves_no_note(options, parameter, steps, tmp_path):
    with watched(tmp_path, **options) as run:
        model = nn.Linear(4, 2)
        model.weight = nn.Parameter(parameter)
        train(nn.Sequential(model), torch.optim.SGD(model.parameters()), steps=steps)
    assert run.parts.matmuls is None
    assert not [note for note in run.seen.notes if "lint" in note]
    assert _get_current_dispatch_mode() is None


def test_a_compiled_model_is_refused_with_advice(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        train(torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters()), steps=4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert run.parts.matmuls is None
    assert "code is compiled by torch.compile" in " ".join(run.seen.notes)
    assert run.steps() == 4


def test_too_few_steps_are_noted(tmp_path):
    with watched(tmp_path, lint=True, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        train(model, torch.optim.SGD(model.parameters()), steps=1)
    assert run.parts.trace is None
    notes = " ".join(run.seen.notes)
    assert "the step whose matrix products were recorded" in notes or "too few steps" in notes
    assert "--kernels" in notes
    assert _get_current_dispatch_mode() is None


def test_a_loop_without_an_optimizer_has_a_step_recorded_and_computed_twice(tmp_path):
    """The step lies between the ends of two backwards."""
    with watched(tmp_path, lint=True, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2)).half()
        for _ in range(6):
            (model(torch.randn(5, 4).half()).float().square().mean() * 2**10).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad.div_(2**40)
                    parameter.grad = None
    assert run.steps() == 6
    assert {one.role for one in run.parts.matmuls.matmuls} == {"forward", "wgrad"}
    assert run.parts.trace is not None
    (divided,) = recorded(run.parts.models[0].session.measurements, DividedInHalf)
    assert (divided.names, divided.lost) == (("0.weight", "0.bias"), 1)


def test_a_gradient_penaltys_backward_is_not_recorded_as_a_forward(tmp_path):
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            x = torch.randn(5, 4, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (slope.square().sum() - 1).square().backward()
            optimizer.step()
    forwards = [(one.module, one.calls, one.recomputed) for one in run.parts.matmuls.matmuls if one.role == "forward"]
    assert forwards == [("0", 1, False), ("2", 1, False)]


def test_a_model_that_is_compiled_within_the_recorded_step(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, steps=1)
        model.compile(backend="eager")
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        assert _get_current_dispatch_mode() is None
        train(model, optimizer, steps=3)
    torch._dynamo.reset()
    assert run.parts.matmuls is None
    assert "was compiled within the step" in " ".join(run.seen.notes)


def test_copies_made_within_the_recorded_steps(tmp_path):
    with watched(tmp_path, lint=True, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        copies = []
        for _ in range(6):
            train(model, optimizer, steps=1)
            copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        each(torch.randn(2, 4))
    assert run.parts.trace is not None
    assert len(run.parts.matmuls.matmuls) == 2


# -- the profile -------------------------------------------------------------------------------------------------------------


def test_one_step_is_profiled_with_the_modules_names(tmp_path):
    with watched(tmp_path, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        train(model, torch.optim.SGD(model.parameters()), steps=5)
        assert not torch.autograd.profiler._is_profiler_enabled
    assert run.parts.trace == tmp_path / "trace.json.gz"
    assert module_names(run.parts.trace) == {"", "0", "1", "2"}
    assert str(read_trace(run.parts.trace))
    assert run.steps() == 5


def module_names(trace) -> set[str]:
    import gzip
    import json

    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    prefix = "mpinspect::module::"
    return {event["name"].removeprefix(prefix) for event in events if event["name"].startswith(prefix)}


def test_a_scripts_own_profile_is_preserved(tmp_path):
    with watched(tmp_path / "a", kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        with torch.profiler.profile() as theirs:
            train(model, optimizer, steps=4)
        assert any("addmm" in event.key for event in theirs.key_averages())
    assert run.parts.trace is None
    assert "the script profiles itself" in " ".join(run.seen.notes)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_our_profile_stops_when_the_script_starts_its_own(tmp_path, steps, kind):
    with watched(tmp_path / "a", kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, steps=steps)
        with kind() as theirs:
            train(model, optimizer, steps=3)
        assert any("addmm" in event.key for event in theirs.key_averages())
    assert run.parts.trace is None
    assert "began to profile itself" in " ".join(run.seen.notes)


def test_a_profile_without_a_gpu_is_noted_but_is_not_a_finding(tmp_path):
    with watched(tmp_path, kernels=True) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        train(model, torch.optim.SGD(model.parameters()), steps=5)
    options = LaunchOptions("train.py", kernels=True)
    report = join(run.parts, run.seen, Outcome("ended", 0), options, tmp_path)
    assert report.kernels is None
    said = [sentence for sentence in report.saw if "no GPU was at work" in sentence]
    assert len(said) == 1
    assert not any("could not be analysed" in sentence for sentence in report.saw)


def test_a_gpu_profile_without_kernels_is_still_reported(tmp_path):
    import json

    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": 1,
        "dur": 1,
        "args": {"correlation": 1},
    }
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [launch]}))
    recordings = Recordings(trace=tmp_path / "trace.json")
    options = LaunchOptions("train.py", kernels=True)
    report = join(recordings, Seen(), Outcome("ended", 0), options, tmp_path)
    assert "no-kernels" in {finding.id for finding in report.kernels.findings}
