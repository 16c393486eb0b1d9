"""Findings of the inspector on common range problems: overflowing FP16 reductions, shared scalers, a NaN in the forward."""

import math

import torch
from torch import nn
from trainings import inspected

from mpinspect import Inspector, count_exponents


def test_sums_that_overflow_fp16_follow_from_the_counts() -> None:
    """In FP16 the sum of 65,536 ones and the square of 256 are inf, and adding ones one by one stops at 2048."""
    ones = torch.ones(65_536, dtype=torch.float16)
    total = torch.tensor(0.0, dtype=torch.float16)
    for one in ones[:4096]:
        total += one
    assert total == 2048
    counted = count_exponents(ones)
    assert counted.sum_abs().low == counted.sum_abs().high == 65_536
    assert torch.tensor(counted.sum_abs().low).half().isinf()
    far = count_exponents(torch.full((4,), 256.0))
    assert far.sum_squares().low == 4 * 256.0**2
    assert torch.tensor(256.0, dtype=torch.float16).square().isinf()


def test_overflowing_batch_norm_statistics_are_reported() -> None:
    """For inputs from N(0, 400^2), an FP16 BatchNorm's running variance is inf, and evaluation returns zeros."""
    norm = nn.BatchNorm1d(4).half()
    batch = 400 * torch.randn(256, 4)
    for _ in range(20):
        trained = norm(batch.half())
    assert trained.isfinite().all()
    assert norm.running_var.isinf().all()
    assert (norm.eval()(batch.half()) == 0).all()

    # A forward broke the variance before it was read.
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).half()
    model(8 * batch.half())
    assert model[0].running_var.isinf().all()
    inspector = inspected(model, lambda _: model(batch.half()).mean(), 8, lr=0.0)
    broken = {finding.id: finding for finding in inspector.report().findings}["statistics-broken"]
    assert broken.message.startswith("running_var of '0' (BatchNorm1d, FP16) has not been finite since step 0")

    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))
    with Inspector(model, capture=("activation",)) as inspector:
        model(batch).sum().backward()
    findings = {finding.id: finding for finding in inspector.report().findings}
    assert "reductions-overflow" in findings
    bounds = count_exponents(batch).sum_squares()
    assert bounds.low <= batch.double().square().sum().item() <= bounds.high
    assert findings["reductions-overflow"].evidence["sum_squares"] == bounds.estimate


def test_an_overflow_under_a_shared_scaler_names_the_network() -> None:
    """The GradScaler halves its scale for both networks; the event names the one that overflowed."""
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.0) for network in model.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    at_step: list[int] = []
    model["critic"].weight.register_hook(lambda gradient: gradient * math.inf if at_step == [1] else gradient)
    with Inspector(model, optimizers=optimizers) as inspector:
        for step in range(3):
            at_step[:] = [step]
            for name, optimizer in zip(model, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model[name](torch.ones(1, 2)).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    session = inspector.session()
    (event,) = session.events
    assert (event.step, event.module, event.skipped) == (1, "critic", True)
    assert [(change.step, change.scale) for change in session.progress.scales] == [(0, 8.0), (2, 4.0)]
    assert (session.progress.steps, session.progress.skipped_steps) == (3, 1)


def test_a_scale_that_collapses_due_to_a_nan_in_the_forward_is_an_error() -> None:
    """Forty forwards with a NaN lower the scale from 8 to 7e-12 without effect."""
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inspector = inspected(model, lambda _: (model(torch.ones(1, 2)) / 0 * 0).sum(), 40, optimizers=None, scaler=scaler)
    assert scaler.get_scale() == 8.0 * 2.0**-40
    assert inspector.session().progress.skipped_steps == 40
    report = inspector.report()
    assert report.findings[0].severity == "error"
    assert "non-finite-event" in {finding.id for finding in report.findings}
