"""Loops modelled on public trainers: compiled or not, their precision, verdict and advice are correct and equal."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import agreeing_reports
import pytest
import torch
import torch.nn.functional as F
from models import Of
from torch import nn
from trainings import take_step
from watched_training import watched

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.precision import run_format
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.report.document import document

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 48, 32, 16, 8, 6
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Compiles a module or a function, or returns it unchanged.
Compile = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _nothing_was_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", NARROW[precision]) if precision in NARROW else contextlib.nullcontext()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


class CastingLinear(nn.Linear):
    """Casts its weight to the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.between = norm(), norm()
        self.queries, self.out = linear(WIDTH, 3 * WIDTH, bias=False), linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = linear(WIDTH, 2 * WIDTH, bias=False), linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.queries(self.before(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear, *, tied: bool = True, compute: Any = None) -> None:
        super().__init__()
        plain = linear is CastingLinear
        norm = partial(nn.RMSNorm, WIDTH, elementwise_affine=False) if plain else partial(nn.LayerNorm, WIDTH)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(linear, norm)])
        self.last, self.head = norm(), linear(WIDTH, VOCABULARY, bias=False)
        self.compute = compute
        if tied:
            self.head.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.08)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.words(x) + self.places.weight[: x.shape[1]]
        x = x if self.compute is None else x.to(self.compute)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        if self.compute is not None:
            logits = 15 * torch.tanh(logits.float() / 15)
        loss = None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return logits, loss


# -- the loops ---------------------------------------------------------------------------------------------------------


def nanogpt(compiles: Compile, precision: str, scales: bool) -> None:
    """Autocast around the call, two micro-batches, a scaler enabled only for FP16, clipping, an evaluation."""
    raw = Decoder()
    decayed = [parameter for parameter in raw.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in raw.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], 3e-4, (0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    model = compiles(raw)
    for step in range(STEPS):
        if step % 4 == 0:
            model.eval()
            with torch.no_grad(), autocast(precision):
                model(*tokens())
            model.train()
        for _ in range(2):
            with autocast(precision):
                _, loss = model(*tokens())
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


class Orthogonal(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz iterations in BF16."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                x = momentum.bfloat16()
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    product = x @ x.mT
                    x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
                parameter.add_(x.float(), alpha=-group["lr"])


def nanochat(compiles: Compile, precision: str, scales: bool) -> None:
    """Always compiled, no autocast: linear layers cast their FP32 weights; two optimizers with a schedule."""
    raw = Decoder(CastingLinear, tied=False, compute=NARROW.get(precision, torch.float32))
    model = compiles(raw)
    tables = [raw.words.weight, raw.places.weight, raw.head.weight]
    optimizers = [
        torch.optim.AdamW(tables, 1e-3, (0.8, 0.95), weight_decay=0.0),
        Orthogonal(raw.blocks.parameters(), 0.02),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    for step in range(STEPS):
        for _ in range(2):
            _, loss = model(*tokens())
            (loss / 2).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / STEPS / 2)
            optimizer.step()
        model.zero_grad(set_to_none=True)


class NativeScaler:
    """Backward, clipping, step and update in one call."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, parameters: Any) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        self._scaler.step(optimizer)
        self._scaler.update()


def timm(compiles: Compile, precision: str, scales: bool) -> None:
    """Images, an averaged copy of the weights, and a scaler object that calls the optimizer."""
    raw = Of(
        lambda self, x: self.head(F.relu(self.norm(self.stem(x))).mean((2, 3))),
        stem=nn.Conv2d(3, 16, 3, padding=1),
        norm=nn.BatchNorm2d(16),
        head=nn.Linear(16, 5),
    )
    averaged = copy.deepcopy(raw).requires_grad_(False)
    model, criterion = compiles(raw), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(raw.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scaler = NativeScaler() if scales else None
    for _ in range(STEPS):
        with autocast(precision):
            loss = criterion(model(torch.randn(BATCH, 3, 8, 8)), torch.randint(5, (BATCH,)))
        optimizer.zero_grad()
        if scaler is not None:
            scaler(loss, optimizer, model.parameters())
        else:
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for mean, value in zip(averaged.state_dict().values(), raw.state_dict().values(), strict=True):
                mean.copy_(torch.lerp(mean.float(), value.float(), 0.1))


class Encoder(nn.Module):
    """Returns a dictionary with its loss, as Transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(VOCABULARY, WIDTH), Block(nn.Linear, partial(nn.LayerNorm, WIDTH))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(self.block(self.words(input_ids))).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accelerate(compiles: Compile, precision: str, scales: bool) -> None:
    """Autocast wrapped around the forward, and so compiled with it; outputs in FP32; a schedule."""
    raw = Encoder()
    if precision in NARROW:
        inner = torch.autocast("cpu", NARROW[precision])(raw.forward)
        raw.forward = lambda **batch: {name: value.float() for name, value in inner(**batch).items()}
    model = compiles(raw)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS / 2)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    for _ in range(STEPS):
        batch = {"input_ids": tokens()[0], "labels": torch.randint(3, (BATCH,))}
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()


def torchtitan(compiles: Compile, precision: str, scales: bool) -> None:
    """Blocks compiled in place, and a compiled loss; "pure" has BF16 weights."""
    raw = Decoder(tied=False)
    raw = raw.bfloat16() if precision == "pure" else raw
    for name, block in raw.blocks.named_children():
        raw.blocks.register_module(name, compiles(block))
    loss_of = compiles(lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()))
    optimizer = torch.optim.AdamW(raw.parameters(), 1e-5 if precision == "pure" else 1e-3, foreach=True)
    for _ in range(STEPS):
        x, y = tokens()
        with autocast(precision):
            loss = loss_of(raw(x)[0], y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# -- their reports -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A trainer in one precision; ``broken`` holds the findings that its fault causes. Without a backend, it runs eagerly."""

    trainer: Callable[[Compile, str, bool], None]
    precision: str
    scales: bool = False
    broken: frozenset[str] = frozenset()
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.trainer.__name__}-{self.precision}{'-scaled' if self.scales else ''}"


UNSCALED = frozenset({"scaler-missing-in-float16"})
CASES = [
    Case(nanogpt, "fp32"),
    Case(nanogpt, "bf16", backend="eager"),
    Case(nanogpt, "fp16", True),
    Case(nanogpt, "fp16", broken=UNSCALED, backend="eager"),
    Case(nanochat, "fp32"),
    Case(nanochat, "bf16", backend="eager"),
    Case(nanochat, "fp16", broken=UNSCALED),
    Case(timm, "fp32"),
    Case(timm, "bf16"),
    Case(timm, "fp16", True, backend="aot_eager"),
    Case(timm, "bf16", True, frozenset({"scaler-in-bfloat16"}), backend="eager"),
    Case(accelerate, "fp32"),
    Case(accelerate, "bf16", backend="aot_eager"),
    Case(accelerate, "fp16", True, backend="eager"),
    Case(accelerate, "fp16", broken=UNSCALED),
    Case(torchtitan, "fp32", backend="eager"),
    Case(torchtitan, "bf16"),
    Case(torchtitan, "pure", broken=frozenset({"updates-lost"}), backend="eager"),
]


def in_place(backend: str) -> Compile:
    def compiles(given: Any) -> Any:
        if not isinstance(given, nn.Module):
            return torch.compile(given, backend=backend)
        given.compile(backend=backend, fullgraph=True)
        return given

    return compiles


def reported(folder: Path, case: Case, compiles: Compile) -> RangeReport:
    with watched(folder) as run:
        case.trainer(compiles, case.precision, case.scales)
    assert len(run.parts.models) == 1
    assert not run.seen.notes
    return analyse(run.parts.models[0].session)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verdict_on_a_public_trainers_loop(tmp_path: Path, case: Case) -> None:
    is_compiled = case.backend != ""
    blocks = case.trainer is torchtitan
    compiles = in_place(case.backend) if blocks else partial(torch.compile, backend=case.backend)
    report = reported(tmp_path, case, compiles if is_compiled else lambda given: given)
    grave = {finding.id for finding in report.findings if finding.severity != "info"}
    assert report.session.progress.steps == STEPS
    assert bool(report.session.progress.compiled) is is_compiled
    assert run_format(report.session).name == FORMATS.get(case.precision, "bfloat16")
    assert (report.verdict.healthy, grave >= case.broken) == (not case.broken, True)
    if not case.broken:
        assert grave == set()
    assert "not known" not in report.verdict.precision
    scalers = [scaler for scaler in report.session.precision.scalers if scaler.enabled]
    assert bool(scalers) is case.scales
    assert not agreeing_reports.contradictions(report)


# -- one small model, compiled in every way ----------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, precision: str = "fp32") -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.inside = precision

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.inside):
            return self.down(torch.tanh(self.norm(self.up(x))))


def trained(folder: Path, model: Small, call: Any, precision: str = "fp32", **options: Any) -> RangeReport:
    """Train with gradients too small for FP16 without a loss scale; return the report."""
    with watched(folder, **options) as run:
        call = call(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            with autocast(precision):
                loss = call(torch.randn(5, 8)).float().square().mean() * 1e-6
            take_step(optimizer, loss)
    assert len(run.parts.models) == 1
    return analyse(run.parts.models[0].session)


def _whole(model: Small) -> Any:
    return torch.compile(model, backend="aot_eager")


def _function(model: Small) -> Any:
    return torch.compile(lambda x: model(x), backend="aot_eager")


def _compiled_in_place(model: Small) -> Any:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("way", [_whole, _function, _compiled_in_place])
@pytest.mark.parametrize(("outside", "inside"), [("bf16", "fp32"), ("fp32", "bf16")], ids=["outside", "inside"])
def test_autocast_around_and_inside_the_compiled_region(tmp_path: Path, way: Any, outside: str, inside: str) -> None:
    report = trained(tmp_path, Small(inside), way, outside)
    assert (run_format(report.session).name, report.verdict.healthy) == ("bfloat16", True)
    assert report.session.progress.compiled == ("",)
    assert "bfloat16" in report.session.precision.unseen
    assert report.session.passed_through() == {"bfloat16"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_samples_that_run_eagerly_show_the_precision_too(tmp_path: Path, precision: str) -> None:
    report = trained(tmp_path, Small(), _whole, precision, eager_samples=True)
    assert (run_format(report.session).name, report.verdict.healthy) == (FORMATS[precision], True)


def test_the_dtype_of_packed_activations_stays_unknown_without_a_warning(tmp_path: Path) -> None:
    """Saved tensors that hooks offload are not unpacked, so no dtype is assumed and no loss scale is advised."""
    unpacked: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        assert torch._C._current_graph_task_id() != -1
        unpacked.append(tensor)
        return tensor

    def packing(model: Small) -> Any:
        compiled = _whole(model)

        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: unpack(packed[0])):
                return compiled(x).float()

        return call

    report = trained(tmp_path, Small(), packing)
    assert unpacked
    assert "" in report.session.precision.unseen
    assert (run_format(report.session), report.verdict.healthy) == (None, True)
    assert {finding.severity for finding in report.findings} == {"info"}
    assert "not known" in report.verdict.precision
    said = " ".join(report.verdict.sentences)
    assert "Whether the run computes in FP16 is not known" in said
    assert "eager_samples=True" in said
    assert "if the run computes in FP16" in repr(document(report, everything=True, notes=None))
    assert not agreeing_reports.contradictions(report)


# -- compilation that is switched off ----------------------------------------------------------------------------------


def _by_argument(model: Small) -> Any:
    return torch.compile(model, backend="eager", disable=True)


def _in_place_by_argument(model: Small) -> Any:
    model.compile(backend="eager", disable=True)
    return model


def _plainly(model: Small) -> Any:
    return torch.compile(model, backend="eager")


def _plainly_in_place(model: Small) -> Any:
    model.compile(backend="eager")
    return model


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


OFF = {
    "argument": (_by_argument, contextlib.nullcontext),
    "argument in place": (_in_place_by_argument, contextlib.nullcontext),
    "torch.compiler.disable": (torch.compiler.disable, contextlib.nullcontext),
    "stance": (_plainly, partial(torch.compiler.set_stance, "force_eager")),
    "stance in place": (_plainly_in_place, partial(torch.compiler.set_stance, "force_eager")),
    "config": (_plainly, lambda: torch._dynamo.config.patch(disable=True)),
    "environment": (_plainly, _environment),
    "environment in place": (_plainly_in_place, _environment),
}


@pytest.mark.parametrize("name", OFF)
def test_compilation_that_is_switched_off_leaves_an_eager_run(tmp_path: Path, name: str) -> None:
    """Hooks run, everything is counted, and a NaN is traced to its module."""
    call, off = OFF[name]

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(-x.square())

    model = Small()
    with off(), watched(tmp_path / "plain") as plain:
        compiled, optimizer = call(model), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            compiled(torch.randn(5, 8)).sum().backward()
            optimizer.step()
        model.norm = Broken()
    session = plain.parts.models[0].session
    assert (session.progress.compiled, session.notes, plain.seen.notes) == ((), (), [])
    assert {key.name for key in session.totals() if key.kind == "activation_gradient"} == {"up", "norm", "down"}
    with off(), watched(tmp_path / "broken") as broken:
        compiled, optimizer = call(model), torch.optim.SGD(model.parameters(), 0.1)
        compiled(torch.randn(5, 8)).sum().backward()
        optimizer.step()
    (event,) = broken.parts.models[0].session.events[:1]
    assert (event.phase, event.module) == ("forward", "norm")


# -- many optimizers ---------------------------------------------------------------------------------------------------


def test_a_busy_machine_does_not_change_the_search_for_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three models are inspected, although the clock advances by a minute per search."""
    now = iter(range(0, 10**9, 60))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    models = [Small() for _ in range(3)]
    with watched(tmp_path) as run:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(5, 8)).sum().backward()
            optimizer.step()
    assert (len(run.names), run.seen.notes) == (3, [])


def test_the_number_of_searches_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps earn further searches; the report names optimizers whose models were not searched for."""
    monkeypatch.setattr("mpinspect.run.models.attaching._MOST_SEARCHES", 2)
    monkeypatch.setattr("mpinspect.run.models.attaching._STEPS_A_SEARCH", 3)
    searches = []
    monkeypatch.setattr("mpinspect.run.models.attaching.living_modules", lambda: searches.append(1) or [model])
    model = Small()
    with watched(tmp_path) as run:
        optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1) for _ in range(4)]
        for _ in range(3):
            optimizers[0].step()
        optimizers.append(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    assert (len(searches), len(run.seen.notes)) == (3, 1)
