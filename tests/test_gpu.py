"""On a CUDA device: the same counts as on the CPU, and no synchronisation added. Runs unattended where there is a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mpinspect import Inspector
from mpinspect.session import KINDS, TensorKey

pytestmark = pytest.mark.gpu


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.LayerNorm(128), nn.Linear(128, 16)).cuda()


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    with _no_synchronisation():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kinds", [KINDS, ()])
def test_no_synchronisation_in_a_step(kinds: tuple[str, ...]) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64, device="cuda")
    _step(model, optimizer, batch)
    with Inspector(model, capture=kinds) as inspector:
        for _ in range(5):
            _step(model, optimizer, batch)
    session = inspector.session()
    assert session.notes == ()
    assert session.progress.steps == 5
    if kinds:
        assert session.totals()[TensorKey("0.weight", "weight_gradient")].samples == 5


def test_no_synchronisation_under_autocast_with_a_scaler() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    batch = torch.randn(32, 64, device="cuda")
    with Inspector(model) as inspector:
        for _ in range(5):
            optimizer.zero_grad()
            with _no_synchronisation(), torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch).float().square().mean()
            scaled = scaler.scale(loss)
            with _no_synchronisation():
                scaled.backward()
            scaler.step(optimizer)  # reads found_inf, as it does without us
            scaler.update()
    session = inspector.session()
    assert session.notes == ()
    assert [change.scale for change in session.progress.scales] == [2.0**10]
    found = session.totals()[TensorKey("0.weight", "weight_gradient")]
    assert (found.passed_through, found.floor_exponent, found.samples) == ("float16", -35, 5)


def test_counts_equal_those_of_the_cpu() -> None:
    """The gradients of the GPU run, counted here and there."""
    from mpinspect import count_exponents

    model = _model()
    batch = torch.randn(32, 64, device="cuda")
    with Inspector(model) as inspector:
        model(batch).square().mean().backward()
    totals = inspector.session().totals()
    for name, parameter in model.named_parameters():
        assert totals[TensorKey(name, "weight_gradient")].histogram == count_exponents(parameter.grad.cpu())


def test_the_culprit_is_told_a_step_later() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.randn(32, 64, device="cuda")

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * math.inf if armed else None

    armed = False
    model[2].register_forward_hook(spoil)
    with Inspector(model, every=50) as inspector:
        for step in range(4):
            armed = step == 2
            _step(model, optimizer, batch)
    event = inspector.session().events[0]
    assert (event.step, event.phase, event.module) == (2, "forward", "2")


def test_training_is_bit_identical() -> None:
    results = []
    for inspect in (False, True):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        inspector = Inspector(model, capture=KINDS)
        if inspect:
            inspector.attach()
        for _ in range(5):
            _step(model, optimizer, torch.randn(32, 64, device="cuda"))
        inspector.detach()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, seen in zip(*results, strict=True):
        assert torch.equal(plain, seen)
