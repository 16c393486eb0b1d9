"""Weights that no longer change although their optimizer steps with gradients."""

from __future__ import annotations

import pytest
import torch
from agreeing_reports import contradictions
from torch import nn

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.records import Standstill, recorded

ID = "weights-stand-still"


class Stopping(torch.optim.SGD):
    """Steps until its weights stop at step ``last``, as a line search that finds nothing."""

    def __init__(self, parameters, last, lr=0.01):
        super().__init__(parameters, lr=lr)
        self.last, self.taken = last, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.taken += 1
        if self.taken <= self.last + 1:
            super().step()


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model, optimizer, *, steps=24, dtype=torch.bfloat16, same_batch=False, after_step=None, factor=1.0):
    with Inspector(model) as inspector:
        for step in range(steps):
            if same_batch:
                torch.manual_seed(5)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(16, 8)).float().square().mean() * factor
            loss.backward()
            optimizer.step()
            if after_step:
                after_step(step, model, optimizer)
    report = inspector.report()
    assert contradictions(report) == []
    return report, inspector.session()


def named(report: RangeReport):
    return [finding for finding in report.findings if finding.id == ID]


@pytest.mark.parametrize("same_batch", [True, False])
def test_weights_that_stop_are_named_with_the_last_measured_step_in_which_they_moved(same_batch):
    model = mlp()
    report, session = train(model, Stopping(model.parameters(), last=3), same_batch=same_batch)
    (finding,) = named(report)
    assert (finding.severity, finding.step) == ("warning", 3)
    assert "The weights have not changed after step 3, although Stopping stepped 20 times since" in finding.message
    assert ("to the last bit in all 3 measured steps" in finding.message) is same_batch
    (record,) = recorded(session.measurements, Standstill)
    assert (record.loss is not None) is same_batch
    assert report.verdict.healthy is False


def rate_of_zero(step, model, optimizer):
    if step == 3:
        optimizer.param_groups[0]["lr"] = 0.0


def trained_on(step, model, optimizer):
    if step == 23:
        model[0].weight.data[0, 0] += 1


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (24, {}),
        (3, {"steps": 10}),
        (3, {"after_step": rate_of_zero}),
        (3, {"after_step": trained_on}),
        (3, {"factor": 0.0}),
        (3, {"dtype": None}),
    ],
    ids=["moving", "a few steps", "no learning rate", "moved at the end", "no gradient", "fp32"],
)
def test_weights_that_may_stay_are_no_finding(last, how):
    model = mlp()
    report, _ = train(model, Stopping(model.parameters(), last=last), **how)
    assert named(report) == []


def test_rows_that_no_sample_uses_are_no_finding():
    model = nn.Embedding(100_000, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model) as inspector:
        for _ in range(24):
            optimizer.zero_grad()
            # The elements that are compared are in other rows.
            model(torch.randint(1, 12_000, (16,))).bfloat16().float().square().mean().backward()
            optimizer.step()
    assert list(recorded(inspector.session().measurements, Standstill)) == []


def test_masters_whose_updates_have_not_reached_16_bits_yet_are_no_finding():
    model = mlp().bfloat16()
    _, session = train(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    assert list(recorded(session.measurements, Standstill)) == []


def test_a_line_search_in_bf16_is_told_to_compute_in_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.linspace(-2, 2, 200)[:, None]

    def fit(dtype):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = nn.functional.mse_loss(model(x).float(), (3 * x).sin())
            loss.backward()
            return loss

        with Inspector(model) as inspector:
            losses = [float(optimizer.step(closure).detach()) for _ in range(40)]
        return inspector.report(), losses

    report, losses = fit(torch.bfloat16)
    (finding,) = named(report)
    assert finding.step < 32
    assert losses[-1] == losses[finding.step + 2]
    assert "Its line search finds no smaller loss" in finding.message
    compile(finding.code, "fix", "exec")
    report, in_fp32 = fit(torch.float32)
    assert named(report) == []
    assert in_fp32[-1] < losses[-1] / 2
