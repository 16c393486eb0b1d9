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


def with_masters(set_back, *, steps=10, dtype=torch.bfloat16, load=lambda weights, masters: None):
    """Train masters with Adam; ``set_back`` is called after each step with its number, the weights and the masters.

    ``load`` changes both before the first step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-4)
    with torch.no_grad():
        load(list(model.parameters()), masters)
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


def loads_weights(weights, masters):
    for weight in weights[1:]:
        weight.normal_()


def loads_both(weights, masters):
    loads_weights(weights, masters)
    for weight, master in zip(weights, masters, strict=True):
        master.copy_(weight)


def test_masters_made_before_the_weights_were_loaded_are_reported():
    found = with_masters(lambda *given: None, load=loads_weights)["masters-stale"]
    assert (found.severity, found.step, found.evidence["names"]) == ("error", 0, ["0.bias", "2.weight", "2.bias"])
    assert "100% of their elements differ" in found.message


@pytest.mark.parametrize("load", [lambda *given: None, loads_both], ids=["as made", "loaded too"])
def test_masters_that_equal_their_weights_are_not_stale(load):
    assert "masters-stale" not in with_masters(lambda *given: None, load=load)


def with_backwards(numbers, *, step_last=False):
    """Train; ``numbers`` has the backwards of each step, and the last step is not taken unless asked for."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Inspector(model, optimizers=optimizer) as inspector:
        for place, number in enumerate(numbers, start=1):
            for _ in range(number):
                model(torch.randn(16, 8)).square().mean().backward()
            if place < len(numbers) or step_last:
                optimizer.step()
                optimizer.zero_grad()
    return {finding.id: finding for finding in analyse(inspector.session()).findings}


def test_backwards_after_the_last_step_are_reported():
    found = with_backwards([2] * 6 + [20])["steps-stopped"]
    assert (found.severity, found.step) == ("warning", 6)
    assert found.evidence == {"backwards": 20, "most": 2}
    assert (
        "No optimizer step followed step 5: 20 backwards have run since, and each step before had at most 2."
        in found.message
    )


@pytest.mark.parametrize(
    ("numbers", "step_last"),
    [([1] * 6 + [11], False), ([8] * 4 + [31], False), ([1] * 6 + [20], True), ([20], False)],
    ids=["few", "as usual", "a step at last", "no step at all"],
)
def test_a_run_that_ends_within_a_step_has_not_stopped(numbers, step_last):
    assert "steps-stopped" not in with_backwards(numbers, step_last=step_last)
