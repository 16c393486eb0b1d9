"""Trains a small network on two ranks, sharded in each way that torch offers, for ``ranges/test_sharded.py``."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Times
from torch import nn

from mpinspect import Inspector, LossScaler, MixedPrecision, count_exponents
from mpinspect.ranges.kinds import KINDS, WEIGHT_GRADIENT
from mpinspect.ranges.session import Session
from mpinspect.ranges.windows.tensors import TensorKey

RANKS, STEPS, MICRO_BATCHES = 2, 4, 4
#: The step in which rank 1 plants an infinity.
BROKEN_AT = 2
#: What the trainings import.
MODULES = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel")
WAYS = ("ddp", "fsdp", "tp", "pipeline", "pipeline-fsdp")
CAPTURES = {"gradients": (WEIGHT_GRADIENT,), "everything": KINDS}
INF = math.inf
#: Why FSDP2 can't train on a CPU here; "" if it can. torch 2.6 calls methods that only a GPU's stream has.
NO_FSDP2 = "" if hasattr(torch.cpu.Stream, "record_event") else f"torch {torch.__version__} has no FSDP2 on a CPU"


class LacksFSDP2(Exception):
    """The case needs FSDP2, which is unavailable (``NO_FSDP2``)."""


class Plant(nn.Module):
    """Multiplies by ``factors``: one for the forward and one for the backward, each 1 or infinity."""

    factors = (1.0, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Times.apply(x, *self.factors)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + MLP(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Plant(), Block(), nn.Linear(8, 8))


def shard(model: nn.Sequential, ranks: int = RANKS, **options: Any) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if NO_FSDP2:
        raise LacksFSDP2
    mesh = init_device_mesh("cpu", (RANKS // ranks, ranks), mesh_dim_names=("all", "shard"))["shard"]
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    return model


def in_parallel(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (model[0], model[2]):
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def build(way: str) -> tuple[nn.Module, nn.Sequential, Callable[[torch.Tensor], None]]:
    """Return the model, the network in it, and a function that runs a step's forwards and backwards."""
    inner = network()
    model: nn.Module = inner
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(inner)
    elif way == "fsdp":
        shard(inner)
    elif way == "tp":
        in_parallel(inner)
    elif way.startswith("pipeline"):
        return inner, inner, _pipeline(inner, "fsdp" in way)
    return model, inner, lambda x: model(x).square().mean().backward()


def _pipeline(stage: nn.Sequential, is_sharded: bool) -> Callable[[torch.Tensor], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if is_sharded:
        shard(stage, 1)
    last = dist.get_rank() == RANKS - 1
    stages = PipelineStage(stage, dist.get_rank(), RANKS, torch.device("cpu"))
    _keep_works()
    schedule = Schedule1F1B(stages, MICRO_BATCHES, loss_fn=lambda output, target: output.square().mean())
    return lambda x: schedule.step(*([] if last else [x]), **({"target": x} if last else {}))


@functools.cache
def _keep_works() -> None:
    """Hold a reference to every transfer of a schedule: gloo cancels a transfer whose Work object is freed.

    The schedules of torch 2.6 hold only the last Work of each batch, so both ranks would wait forever.
    """
    start, works = dist.batch_isend_irecv, []

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        started = start(operations)
        works.extend(started)
        return started

    dist.batch_isend_irecv = batch_isend_irecv


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local(weight) for weight in model.parameters()]


def same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


def told(session: Session) -> dict[str, Any]:
    """Return the parts of a session that the tests check."""
    totals = session.totals()
    return {
        "steps": session.progress.steps,
        "skipped": session.progress.skipped_steps,
        "notes": session.notes,
        "events": [(event.step, event.phase, event.module, event.explanation) for event in session.events],
        "uncounted": [info.key for info in session.watched if info.key not in totals],
        "types": {info.module_type for info in session.watched},
        "samples": {key: window.samples for key, window in totals.items()},
        "totals": totals,
        "session": session,
    }


# -- cases -------------------------------------------------------------------------------------------------------------


def planted(way: str, phase: str, on: int = 1) -> dict[str, Any]:
    """Return, for each capture, the session's record of an infinity that one rank plants in a phase ("": no infinity)."""
    found: dict[str, Any] = {"same": []}
    bare = None
    for name, kinds in (("bare", None), *CAPTURES.items()):
        model, inner, step = build(way)
        inspector = None if kinds is None else Inspector(model, capture=kinds).attach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(STEPS):
            spoils = number == BROKEN_AT and dist.get_rank() == on
            inner[1].factors = (
                INF if phase == "forward" and spoils else 1.0,
                INF if phase == "backward" and spoils else 1.0,
            )
            optimizer.zero_grad()
            step(batch(number))
            optimizer.step()
        if inspector is None:
            bare = weights(model)
        else:
            inspector.detach()
            found["same"].append(same(bare or [], weights(model)))
            found[name] = told(inspector.session())
    return found


def replaced(when: str, ranks: int) -> dict[str, Any]:
    """Return the session of an FSDP2 training whose inspector was created or attached before or after ``fully_shard``."""
    found: dict[str, Any] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    trained = []
    for inspects in (True, False):
        model = network()
        inspector = Inspector(model, capture=KINDS) if inspects and when != "after" else None
        if inspector is not None and when == "before":
            inspector.attach()
        if when == "swapped":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            if inspector is not None:
                inspector.attach()
        shard(model, ranks)
        if when == "swapped":
            # Accelerate does this too.
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if inspects and when == "after":
            inspector = Inspector(model, capture=KINDS)
        if inspector is not None and when in ("made before", "after"):
            inspector.attach()
        if when != "swapped":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for number in range(STEPS):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            for name, weight in model.named_parameters() if inspects else ():
                gradients.setdefault(name, []).append(local(weight.grad))  # type: ignore[arg-type]
            optimizer.step()
        trained.append(weights(model))
        if inspector is not None:
            with torch.no_grad():
                # Afterwards the root module holds unsharded weights.
                model(batch(0))
            inspector.detach()
            found |= told(inspector.session())
            found["model"] = inspector.session().info.model
    found["same"] = same(*trained)
    found["exact"] = [
        name
        for name, parts in gradients.items()
        if found["totals"].get(TensorKey(name, WEIGHT_GRADIENT)) is not None
        and found["totals"][TensorKey(name, WEIGHT_GRADIENT)].histogram == count_exponents(torch.cat(parts))
    ]
    return found


def penalty(model: nn.Module) -> None:
    x = batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(batch(1)).square().mean() + gradient.square().mean()).backward()


def gradients_only(model: nn.Module) -> None:
    for number in range(2):
        torch.autograd.grad(model(batch(number)).sum(), list(model.parameters()))
    accumulated(model)


def hessian(model: nn.Module) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(batch(0)).square().mean(), parameters, create_graph=True)
    torch.autograd.grad(sum((each.sum() for each in gradients), torch.zeros(())), parameters)
    accumulated(model)


def accumulated(model: nn.Module) -> None:
    for number in range(3):
        model(batch(number)).square().mean().backward()


def without_sync(model: nn.Module) -> None:
    for number in range(3):
        is_last = number == 2
        with contextlib.ExitStack() as stack:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                if not is_last:
                    stack.enter_context(model.no_sync())
            else:
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model(batch(number)).square().mean().backward()


def unused_first(model: nn.Module) -> None:
    for number in range(3):
        model[2](batch(number)).square().mean().backward()  # type: ignore[index]


#: Each step's backwards, by the way in which the model is wrapped.
BODIES: dict[str, tuple[Callable[[nn.Module], None], ...]] = {
    "plain": (penalty, gradients_only, hessian, accumulated, unused_first),
    "fsdp": (accumulated, without_sync),
    "ddp": (accumulated, without_sync),
}


def steps_of(way: str, body: Callable[[nn.Module], None], by_hand: bool) -> int:
    """Train three steps, with an optimizer made under the inspector or with updates by hand; return how many were counted."""
    model, _, _ = build(way)
    with Inspector(model, capture=(WEIGHT_GRADIENT,)) as inspector:
        optimizer = None if by_hand else torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            body(model)
            if optimizer is not None:
                optimizer.step()
            with torch.no_grad():
                for weight in model.parameters():
                    if by_hand and weight.grad is not None:
                        weight -= 0.01 * weight.grad
                    weight.grad = None
    return inspector.session().progress.steps


def scaled(way: str, kind: str, folder: Path) -> dict[str, Any]:
    """Train with a loss scale, clipping and one overflow on rank 1; return the sessions of a whole run and of a resumed one."""
    trained, found = {}, {}
    for name in ("bare", "inspected", "resumed"):
        model, inner, _ = build(way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scaler = (torch.amp.GradScaler if kind == "GradScaler" else LossScaler)("cpu", 256.0, growth_interval=2)
        inspector = None if name == "bare" else Inspector(model, capture=KINDS).attach()
        if name == "resumed":
            _restore(folder, model, optimizer)
            scaler.load_state_dict(torch.load(folder / f"scaler{dist.get_rank()}.pt"))
        for number in range(2 if name == "resumed" else 0, STEPS):
            inner[1].factors = (1.0, INF if number == BROKEN_AT and dist.get_rank() == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(model(batch(number)).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if number == 1 and name == "inspected":
                _save(folder, model, optimizer)
                torch.save(scaler.state_dict(), folder / f"scaler{dist.get_rank()}.pt")
        if inspector is not None:
            inspector.detach()
            found[name] = told(inspector.session())
        trained[name] = [*weights(model), torch.tensor(scaler.get_scale())]
    found["same"] = [same(trained["bare"], trained[name]) for name in ("inspected", "resumed")]
    found["finite"] = all(bool(weight.isfinite().all()) for weight in trained["inspected"])
    return found


def _save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(states, checkpoint_id=folder)


def _restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def mixed(precision: str, **options: Any) -> dict[str, Any]:
    """Return the session of a sharded training by MixedPrecision with one overflow on rank 1, or MixedPrecision's error."""
    trained, stepped, session = [], [], None
    for inspects in (False, True):
        model = shard(network(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            mp = MixedPrecision(model, optimizer, precision, "dynamic" if "fp16" in precision or options else None)
        except ValueError as error:
            return {"error": str(error)}
        inspector = Inspector(model, capture=KINDS).attach() if inspects else None
        steps = []
        for number in range(STEPS):
            model[1].factors = (1.0, INF if number == BROKEN_AT and dist.get_rank() == 1 else 1.0)
            mp.zero_grad()
            with mp.autocast():
                loss = model(batch(number)).float().square().mean()
            mp.backward(loss)
            steps.append(mp.step())
        if inspector is not None:
            inspector.detach()
            session = inspector.session()
        trained.append(weights(model))
        stepped.append(steps)
    assert session is not None
    return {"same": same(*trained), "stepped": stepped, **told(session)}


def sharded_too_late() -> str:
    """Return the error of a MixedPrecision that was made before ``fully_shard``."""
    model = network()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.05), "bf16-master")
    shard(model)
    mp.backward(model(batch(0).bfloat16()).float().square().mean())
    try:
        mp.step()
    except RuntimeError as error:
        return str(error)
    return ""


def outlives_its_group() -> dict[str, Any]:
    """Return the sessions of two trainings whose process group is destroyed before their inspectors are detached."""
    model = in_parallel(network())
    sharded = shard(network())
    inspectors = [Inspector(each, capture=KINDS).attach() for each in (model, sharded)]
    optimizers = []
    for each in (model, sharded):
        optimizers.append(torch.optim.SGD(each.parameters(), lr=0.05))
        each(batch(0)).square().mean().backward()
        optimizers[-1].step()
        each(batch(1)).square().mean().backward()
    dist.destroy_process_group()
    for inspector in inspectors:
        inspector.detach()
        str(inspector.report())
    return {str(number): told(inspector.session()) for number, inspector in enumerate(inspectors)}


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for way in WAYS:
        for phase in ("", "forward", "backward"):
            yield f"planted {way} {phase}", lambda way=way, phase=phase: planted(way, phase)
    yield "first stage", lambda: planted("pipeline", "forward", 0)
    for ranks in (1, RANKS):
        for when in ("before", "made before", "after"):
            yield f"{when} {ranks}", lambda when=when, ranks=ranks: replaced(when, ranks)
    yield "swapped", lambda: replaced("swapped", RANKS)
    for way, bodies in BODIES.items():
        for body in bodies:
            for by_hand in (False, True):
                name = f"steps {way} {body.__name__} {'by hand' if by_hand else 'optimizer'}"
                yield name, lambda way=way, body=body, by_hand=by_hand: steps_of(way, body, by_hand)
    for way in ("ddp", "fsdp"):
        for kind in ("GradScaler", "LossScaler"):
            place = folder / f"{way}-{kind}"
            place.mkdir(exist_ok=True)
            yield f"scaled {way} {kind}", lambda way=way, kind=kind, place=place: scaled(way, kind, place)
    for precision in ("fp16-amp", "fp16-master", "bf16-master"):
        yield f"mixed {precision}", lambda precision=precision: mixed(precision)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    yield "mixed policy", lambda: mixed("fp32", mp_policy=policy)
    yield "too late", sharded_too_late
    yield "outlived", outlives_its_group


def all_cases(folder: Path) -> dict[str, Any]:
    """Return this rank's results by case. All cases share one pair of processes, since starting one takes seconds."""
    found = {}
    for name, case in cases(folder):
        with contextlib.suppress(LacksFSDP2):
            found[name] = case()
    return found
