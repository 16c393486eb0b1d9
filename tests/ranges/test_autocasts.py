"""Findings on autocast: updates inside a region, and regions for another device."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from trainings import take_step

from mpinspect import Inspector


def report(*, around=None, each=None, after_step=lambda: None, steps=6):
    """Train with a region around the loop, in each step, or both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = Inspector(model, optimizers=optimizer)
    with inspector, around() if around else nullcontext():
        for _ in range(steps):
            with each() if each else nullcontext():
                loss = model(torch.randn(16, 8)).float().square().mean()
            take_step(optimizer, loss)
            after_step()
    return analyse(inspector.session())


def ids(found):
    return {finding.id: finding for finding in found.findings}


def bf16(**options):
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


def test_a_region_around_the_loop_uses_outdated_casts():
    found = ids(report(around=bf16()))["autocast-around-updates"]
    assert (found.severity, found.step) == ("error", 1)
    assert found.evidence["measured_steps"] == 4.0


@pytest.mark.parametrize(
    "options",
    [
        {"each": bf16()},
        {"around": bf16(cache_enabled=False)},
        {"around": bf16(enabled=False)},
        {"around": bf16(), "after_step": lambda: torch.clear_autocast_cache()},
        {},
    ],
    ids=["in each step", "without a cache", "disabled", "cleared", "none"],
)
def test_other_regions_use_current_casts(options):
    assert "autocast-around-updates" not in ids(report(**options))


def cuda(**options):
    def made():
        with warnings.catch_warnings():
            # torch warns that CUDA is not available.
            warnings.simplefilter("ignore")
            return torch.autocast("cuda", torch.float16, **options)

    return made


def test_a_region_for_another_device_is_reported():
    found = ids(report(each=cuda()))["autocast-for-another-device"]
    assert (found.severity, found.evidence["asked"], found.evidence["device"]) == ("warning", "cuda", "cpu")


def test_a_disabled_region_for_another_device_is_not_reported():
    assert "autocast-for-another-device" not in ids(report(each=cuda(enabled=False)))


def test_a_region_for_another_device_is_not_reported_next_to_the_right_one():
    class Both:
        def __enter__(self):
            self.regions = [cuda()(), bf16()()]
            for region in self.regions:
                region.__enter__()

        def __exit__(self, *error):
            for region in reversed(self.regions):
                region.__exit__(*error)

    assert "autocast-for-another-device" not in ids(report(each=Both))


def test_torchs_functions_are_restored():
    before = torch.autocast.__init__, torch.clear_autocast_cache
    report(each=bf16())
    assert (torch.autocast.__init__, torch.clear_autocast_cache) == before


@pytest.mark.parametrize(("cached", "reported"), [(True, True), (False, False)])
def test_weights_that_are_swapped_within_a_region_use_outdated_casts(cached, reported):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    other = [torch.randn_like(each) for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = Inspector(model, optimizers=optimizer, second=True)

    def swap(values):
        kept = [each.detach().clone() for each in model.parameters()]
        for each, value in zip(model.parameters(), values, strict=True):
            each.data.copy_(value)
        return kept

    with inspector:
        for _ in range(3):
            x = torch.randn(16, 8)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                output = model(x)
                with torch.no_grad():
                    kept = swap(other)
                    reference = model(x)
                    swap(kept)
            take_step(optimizer, (output.float() - reference.float()).square().mean())
    found = ids(analyse(inspector.session())).get("autocast-around-updates")
    assert (found is not None) is reported
    if found is not None:
        assert (found.severity, found.step, found.layer) == ("error", 1, "0")


def test_slices_of_a_weight_have_casts_of_their_own():
    experts = nn.ParameterList([nn.Parameter(torch.randn(3, 8, 8))])
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    with Inspector(experts, optimizers=optimizer, second=True) as inspector:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = torch.stack([torch.randn(4, 8) @ each for each in experts[0]])
            take_step(optimizer, output.float().square().mean())
    assert "autocast-around-updates" not in ids(analyse(inspector.session()))
