"""The training loop's protocol: loss scales by hand, and masters that are overwritten with their weights."""

from __future__ import annotations

import pytest
import torch
from agreeing_reports import analyse
from torch import nn

from mpinspect import Inspector


def by_hand(multiplied, divided, *, masters=False, steps=10, of_loss=lambda loss, scale: loss * scale):
    """Train with a loss scaled by hand; ``multiplied`` and ``divided`` return the factors of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            optimizer.zero_grad()
            of_loss(loss, multiplied(step)).backward()
            for parameter in model.parameters():
                parameter.grad.div_(divided(step))
            optimizer.step()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_a_division_by_another_scale_is_reported():
    found = by_hand(lambda step: 256.0, lambda step: 512.0 if step == 3 else 256.0)["divided-by-another-scale"]
    assert (found.severity, found.step) == ("error", 3)
    assert (found.evidence["multiplied_by"], found.evidence["divided_by"]) == (256.0, 512.0)
    assert "0.5 times the true gradients" in found.message


@pytest.mark.parametrize(
    ("multiplied", "divided"),
    [
        (lambda step: 256.0, lambda step: 256.0),
        (lambda step: 2.0 ** (8 + step), lambda step: 2.0 ** (8 + step)),
        # Also averaged over micro-batches, in every step.
        (lambda step: 256.0, lambda step: 1024.0),
        # Clipped in one step.
        (lambda step: 256.0, lambda step: 700.0 if step == 2 else 256.0),
        (lambda step: 1.0, lambda step: 512.0 if step == 3 else 1.0),
    ],
    ids=["constant", "growing", "an average", "clipped", "no scale"],
)
def test_divisions_by_the_same_scale_are_no_fault(multiplied, divided):
    assert "divided-by-another-scale" not in by_hand(multiplied, divided)


def test_a_loss_divided_by_the_inverse_scale_is_recognised():
    found = by_hand(
        lambda step: 256.0,
        lambda step: 128.0 if step == 2 else 256.0,
        of_loss=lambda loss, scale: loss / (1 / scale),
    )
    assert found["divided-by-another-scale"].step == 2


def with_masters(set_back, *, steps=10, dtype=torch.bfloat16):
    """Train masters with Adam; ``set_back`` is called after each step with its number, the weights and the masters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-4)
    with Inspector(model, optimizers=optimizer) as inspector:
        for step in range(steps):
            model.zero_grad()
            model(torch.randn(16, 8).to(dtype)).float().square().mean().backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad = weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master)
                set_back(step, list(model.parameters()), masters)
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def copies_back(step, weights, masters):
    if step == 2:
        for weight, master in zip(weights, masters, strict=True):
            master.copy_(weight)


def test_masters_overwritten_with_their_weights_are_reported():
    found = with_masters(copies_back)["masters-overwritten"]
    assert (found.severity, found.step, found.evidence["parameters"]) == ("error", 2, 4)
    assert found.evidence["changed"] > 0.5


def decays(step, weights, masters):
    for master in masters:
        master.mul_(0.99)


@pytest.mark.parametrize("set_back", [lambda *given: None, decays], ids=["untouched", "decayed by hand"])
def test_masters_with_their_own_values_are_not_reported(set_back):
    assert "masters-overwritten" not in with_masters(set_back)
