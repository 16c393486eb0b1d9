"""Trains on the stand-in device, in a separate process; prints each check's name and whether it held or why it failed."""

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import stand_in_device
import torch
from torch import nn
from trainings import mixed_step, take_step

from mpinspect import Inspector, MixedPrecision, count_exponents
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.records import BrokenWeights, ExaminedArgument, NeverUpdated, recorded
from mpinspect.ranges.windows.tensors import TensorKey

DEVICE = stand_in_device.load()
#: Steps 0..4, 8 and 16 are measured, 20 is sampled.
STEPS = 21
#: Trainings of 71 steps, with further measured ones at 32 and 64.
LONGER = {"defaults": 71, "states in FP16": 71, "every=10": 71, "budget": 71}
Step = Callable[[], object]


def network(device: str = stand_in_device.NAME) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.BatchNorm1d(32), nn.Linear(32, 4)
    return nn.Sequential(*layers).to(device)


def batch(device: str = stand_in_device.NAME) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)


def plain() -> tuple[nn.Module, Step]:
    model, x = network(), batch()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        take_step(optimizer, model(x).square().mean())

    return model, step


def saturated() -> tuple[nn.Module, Step]:
    model, x = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        take_step(optimizer, (model(x) + 40).sigmoid().mean())

    return model, step


def scaled() -> tuple[nn.Module, Step]:
    model, x = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(stand_in_device.NAME, init_scale=2.0**10)

    def step() -> None:
        with torch.autocast(stand_in_device.NAME, dtype=torch.float16):
            loss = model(x).float().square().mean()
        take_step(optimizer, loss, scaler)

    return model, step


def masters() -> tuple[nn.Module, Step]:
    model, x = network(), batch()
    mp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16-master")
    return mp.model, lambda: mixed_step(mp, lambda: mp.model(x.bfloat16()).float().square().mean())


def accumulated() -> tuple[nn.Module, Step]:
    model, x = network().bfloat16(), batch().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            model(x).float().square().mean().backward()
        optimizer.step()

    return model, step


def zeroed_between() -> tuple[nn.Module, Step]:
    model, x = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
        optimizer.step()

    return model, step


def scaled_by_hand() -> tuple[nn.Module, Step]:
    """FP16 weights whose gradients the loop divides in FP16, with masters of its own, and a gradient asked for besides."""
    model, x = network().half(), batch().half()
    copies = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.01)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).float().square().mean()
        torch.autograd.grad(loss, list(model.parameters())[:1], retain_graph=True)
        (loss * 1024.0).backward()
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            parameter.grad.div_(1024.0)
            copy.grad = parameter.grad.float()
        optimizer.step()
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            parameter.detach().copy_(copy)

    return model, step


def states_in_half() -> tuple[nn.Module, Step]:
    """FP16 weights with FP16 moments, before FP32 ones that a BF16 copy overwrites after each step."""
    head, x = nn.Linear(4, 32).to(stand_in_device.NAME), batch().half()
    model = nn.Sequential(network().half(), _Float(), head)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)

    def step() -> None:
        take_step(optimizer, model(x).square().mean())
        with torch.no_grad():
            head.weight.copy_(head.weight.bfloat16())

    return model, step


class _Float(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def adversarial() -> tuple[nn.Module, Step]:
    generator, critic, x = network(), nn.Linear(4, 1).to(stand_in_device.NAME), batch()
    both = nn.ModuleList([generator, critic])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in both]

    def step() -> None:
        for optimizer, sign in zip(optimizers, (-1.0, 1.0), strict=True):
            take_step(optimizer, sign * critic(generator(x)).mean())

    return both, step


TRAININGS: dict[str, tuple[Callable[[], tuple[nn.Module, Step]], dict[str, Any]]] = {
    "defaults": (plain, {}),
    "all kinds": (plain, {"capture": KINDS}),
    "saturated sigmoid": (saturated, {}),
    "scaler": (scaled, {}),
    "masters": (masters, {}),
    "accumulation": (accumulated, {}),
    "lost backwards": (zeroed_between, {}),
    "scaled by hand": (scaled_by_hand, {"loss_scale": 1024.0}),
    "states in FP16": (states_in_half, {"loss_scale": 1.0}),
    "gan": (adversarial, {}),
    "every=10": (plain, {"every": 10}),
    "budget": (plain, {"max_overhead": 0.05}),
}


def waits_of(step: Step, steps: int) -> list[dict[str, int]]:
    found = []
    for _ in range(steps):
        DEVICE.now += 1
        DEVICE.forget()
        step()
        found.append(DEVICE.waits())
    return found


def never_waits(name: str, late: int = 0) -> None:
    """Assert that each step waits as often as without the inspector, and that attaching waits at most once."""
    make, options = TRAININGS[name]
    steps = STEPS if late else LONGER.get(name, STEPS)
    bare = waits_of(make()[1], steps)
    model, step = make()
    DEVICE.forget()
    DEVICE.late = late
    inspector = Inspector(model, **options).attach()
    assert sum(DEVICE.waits().values()) <= 1, DEVICE.waits()
    inspected = waits_of(step, steps)
    inspector.detach()
    DEVICE.late = 0
    more = {at: found for at, (found, expected) in enumerate(zip(inspected, bare, strict=True)) if found != expected}
    assert not more, more
    assert inspector.session().notes == (), inspector.session().notes
    found = {each.what for each in inspector.session().measurements}
    assert ("lost-backwards" in found) is (name == "lost backwards"), found
    # The inspector does not know the critic's optimizer yet in the first step, and ends that step before it.
    assert inspector.session().progress.steps - steps in (0, name == "gan")


class Recurrent(nn.Module):
    """A cell called at each of three time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 16, device=x.device)
        for moment in x:
            state = self.cell(moment, state)
        return self.head(state)  # type: ignore[no-any-return]


def counted() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Yield models on the device, each with a batch."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield network().to(dtype), batch().to(dtype)
    grouped = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    gated = nn.Sequential(nn.Linear(16, 32), nn.GLU(), nn.ReLU(inplace=True), nn.Bilinear(16, 16, 2))
    gated[3].forward = lambda x: nn.functional.bilinear(x, x, gated[3].weight, gated[3].bias)
    given = torch.arange(10).remainder(11).view(2, 5), torch.randn(3, 4, 8), torch.randn(4, 16), torch.randn(4, 16)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    text = nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))
    for model, x in zip((text, Recurrent(), grouped, gated), given, strict=True):
        yield model.to(stand_in_device.NAME), x.to(stand_in_device.NAME)


def counts_are_the_cpus() -> None:
    """Assert that the device's counts equal counts on the host."""
    for model, x in counted():
        with Inspector(model, capture=KINDS, loss_scale=1) as inspector:
            model(x).float().square().mean().backward()
        totals = inspector.session().totals()
        for name, parameter in model.named_parameters():
            expected = count_exponents(parameter.grad.cpu())
            assert totals[TensorKey(name, "weight_gradient")].histogram == expected, name


def _spoil_gradient(module: nn.Module, args: object, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient * math.inf)


def culprits_are_the_cpus() -> None:
    for where in ("forward", "backward"):
        events = []
        for device in ("cpu", stand_in_device.NAME):
            model, x = network(device), batch(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            if where == "forward":
                model[2].register_forward_hook(lambda module, args, output: output * math.inf)
            else:
                model[2].register_forward_hook(_spoil_gradient)
            with Inspector(model) as inspector:
                take_step(optimizer, model(x).square().mean())
            event = inspector.session().events[0]
            events.append((event.step, event.phase, event.module, event.what))
        assert events[0] == events[1], events


def operations_of_a_broken_loss() -> None:
    """Assert that the operation that broke a loss, or its backward, in an unmeasured step is recorded, and that no step before
    it waits.
    """
    edges = {"a logarithm of zero": torch.log, "a square root of zero": torch.sqrt}
    for text, edge in edges.items():
        model, x = network(), batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Inspector(model, second=False) as inspector:
            for at in range(10):
                DEVICE.forget()
                take_step(optimizer, edge((model(x) * (at != 6)).square().sum(1)).mean())
                assert at >= 6 or DEVICE.waits() == {}, (at, DEVICE.waits())
        (found,) = recorded(inspector.session().measurements, ExaminedArgument)
        assert (found.step, found.text.startswith(text), found.elements) == (6, True, 8), found


def a_loss_without_backward() -> None:
    """Assert that the operation of a loss is recorded whose backward the loop leaves out, in the last and unmeasured step."""
    model, x = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, second=False) as inspector:
        for at in range(7):
            loss = (model(x).square() * (at != 6)).log().mean()
            if not loss.isfinite():
                break
            take_step(optimizer, loss)
    (found,) = recorded(inspector.session().measurements, ExaminedArgument)
    assert (found.step, found.text) == (6, "a logarithm of zero"), found


def weights_broken_before_skipped_steps() -> None:
    """Assert that the step in which weights broke is recorded, although they are read in a later one."""
    model, x = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(stand_in_device.NAME, init_scale=2.0**10)
    with Inspector(model, second=False) as inspector:
        for at in range(12):
            take_step(optimizer, model(x).square().mean(), scaler)
            if at == 6:
                model[0].weight.data.mul_(math.nan)
    (found,) = recorded(inspector.session().measurements, BrokenWeights)
    assert (found.step, found.names) == (7, ("0.weight",)), found


def data_written_without_a_version() -> None:
    """Assert that updates through ``.data``, which leave the version as it is, count as updates, and that none is told."""
    for moves in (False, True):
        model, x = network(), batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Inspector(model, optimizers=optimizer) as inspector:
            for _ in range(4):
                model(x).square().mean().backward()
                for parameter in model.parameters():
                    parameter.data -= 0.1 * parameter.grad * moves
                    parameter.grad = None
        assert len(list(recorded(inspector.session().measurements, NeverUpdated))) == 1 - moves


def a_default_device() -> None:
    torch.set_default_device(stand_in_device.NAME)
    try:
        model, step = plain()
        with Inspector(model) as inspector:
            for _ in range(5):
                step()
    finally:
        torch.set_default_device("cpu")
    assert inspector.session().notes == (), inspector.session().notes
    assert inspector.session().totals()


def a_model_that_moves() -> None:
    model = network("cpu")
    with Inspector(model, max_overhead=0.5) as inspector:
        model.to(stand_in_device.NAME)
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), batch()
        for _ in range(6):
            DEVICE.forget()
            take_step(optimizer, model(x).square().mean())
            assert DEVICE.waits() == {}, DEVICE.waits()
    assert inspector.session().progress.steps == 6


def a_captured_step() -> None:
    """Assert that, while a whole step is captured, only the script's own operations are launched."""
    launched = []
    for is_inspected in (False, True):
        model, step = plain()
        inspector = Inspector(model)
        if is_inspected:
            inspector.attach()
        for _ in range(3):
            step()
        DEVICE.forget()
        with DEVICE.capture():
            step()
        launched.append(DEVICE.launches())
        inspector.detach()
    assert launched[0] == launched[1], launched
    (note,) = inspector.session().notes
    assert "CUDA graphs are not seen" in note


def an_inference() -> None:
    """Assert that attaching never waits, nor a forward, but for those that are computed twice, which must not fail."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for second, twice in ((False, set[int]()), (True, {0, 1})):
            model, x = network().to(dtype).eval(), batch().to(dtype)
            DEVICE.forget()
            with Inspector(model, inference=True, second=second) as inspector, torch.no_grad():
                assert DEVICE.waits() == {}, DEVICE.waits()
                waits = waits_of(partial(model, x), STEPS)
            assert {at for at, found in enumerate(waits) if found} == twice, (dtype, waits)
            assert not any("failed" in note for note in inspector.session().notes), inspector.session().notes
            assert inspector.session().progress.steps == STEPS


CHECKS: dict[str, Callable[[], None]] = {
    **{f"never waits: {name}": lambda name=name: never_waits(name) for name in TRAININGS},  # type: ignore[misc]
    "never waits: late events": lambda: never_waits("defaults", late=3),
    "counts": counts_are_the_cpus,
    "culprits": culprits_are_the_cpus,
    "default device": a_default_device,
    "moved": a_model_that_moves,
    "capture": a_captured_step,
    "inference": an_inference,
    "broken loss": operations_of_a_broken_loss,
    "loss without backward": a_loss_without_backward,
    "broken weights": weights_broken_before_skipped_steps,
    "data": data_written_without_a_version,
}


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        print(f"failed: {name}\n{traceback.format_exc()}", flush=True)
    else:
        print(f"held: {name}", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or CHECKS:
        with _told(name):
            CHECKS[name]()
