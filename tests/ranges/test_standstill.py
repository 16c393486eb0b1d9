"""Weights that no longer change although their optimizer steps with gradients."""

import math

import pytest
import torch
from agreeing_reports import analyse, contradictions
from analysis_sessions import session_of, spread, weight
from torch import nn
from trainings import closure_of, inspected, take_step

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport
from mpinspect.ranges.records import RateZero, Standstill, recorded
from mpinspect.ranges.session import Progress

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
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(16, 8)).float().square().mean() * factor
            take_step(optimizer, loss)
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


def trained_on(step, model, optimizer):
    if step == 23:
        model[0].weight.data[0, 0] += 1


@pytest.mark.parametrize(
    ("last", "how"),
    [(24, {}), (3, {"steps": 10}), (3, {"after_step": trained_on}), (3, {"factor": 0.0}), (3, {"dtype": None})],
    ids=["moving", "a few steps", "moved at the end", "no gradient", "fp32"],
)
def test_weights_that_may_stay_are_not_a_finding(last, how):
    model = mlp()
    report, _ = train(model, Stopping(model.parameters(), last=last), **how)
    assert named(report) == []


def test_rows_that_no_sample_uses_are_not_a_finding():
    model = nn.Embedding(100_000, 8)

    def loss_of(_):
        # The elements that are compared are in other rows.
        return model(torch.randint(1, 12_000, (16,))).bfloat16().float().square().mean()

    inspector = inspected(model, loss_of, 24, optimizers=None)
    assert list(recorded(inspector.session().measurements, Standstill)) == []


def test_masters_whose_updates_have_not_reached_16_bits_yet_are_not_a_finding():
    model = mlp().bfloat16()
    _, session = train(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    assert list(recorded(session.measurements, Standstill)) == []


def test_a_line_search_in_bf16_is_told_to_compute_in_fp32():
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.linspace(-2, 2, 200)[:, None]

    def fit(dtype):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

        def loss_of():
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                return nn.functional.mse_loss(model(x).float(), (3 * x).sin())

        with Inspector(model) as inspector:
            losses = [float(optimizer.step(closure_of(optimizer, loss_of)).detach()) for _ in range(40)]
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


# -- learning rates of 0 ------------------------------------------------------------------------------------------------


def with_rates(rate_of, *, steps=40, backwards=1, groups=1, dtype=None):
    """Train; ``rate_of`` returns the learning rates of a step's groups."""
    model = mlp()
    parts = [{"params": each.parameters()} for each in (model[0], model[2])] if groups == 2 else model.parameters()
    optimizer = torch.optim.AdamW(parts, lr=0.01)
    with Inspector(model) as inspector:
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rate_of(step), strict=True):
                group["lr"] = rate
            for _ in range(backwards):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                    loss = model(torch.randn(16, 8)).float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = inspector.report()
    assert contradictions(report) == []
    return report


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0)], ids=["an integer", "a float", "a tensor"])
def test_a_learning_rate_that_ends_at_zero_is_reported_with_its_first_step(dtype, zero):
    (finding,) = named(with_rates(lambda step: [zero if step >= 12 else 0.01], backwards=3, dtype=dtype))
    assert (finding.severity, finding.step, finding.certainty) == ("warning", 12, "measured")
    assert (finding.evidence["steps"], finding.evidence["of"]) == (28, 40)
    assert finding.message == (
        "The learning rate of AdamW was 0 in the last 28 of its 40 steps, from step 12 on: these steps change no weight. A step "
        "has 3 backwards on average: a scheduler that steps once per backward ends too early."
    )


def test_a_learning_rate_that_is_always_zero_is_reported():
    (finding,) = named(with_rates(lambda step: [0.0]))
    assert (finding.severity, finding.step) == ("warning", 0)
    assert "was 0 in all of its 40 steps" in finding.message
    assert "not 0 from the start" in finding.fix


def test_a_rate_of_zero_in_less_than_a_quarter_of_the_steps_is_information():
    (finding,) = named(with_rates(lambda step: [0.0 if step >= 31 else 0.01]))
    assert (finding.severity, finding.evidence["steps"]) == ("info", 9)


@pytest.mark.parametrize(
    ("rate_of", "how"),
    [
        (lambda step: [0.001 * step], {}),
        (lambda step: [0.01 * (1 - step / 39)], {}),
        (lambda step: [0.0 if step >= 33 else 0.01], {}),
        (lambda step: [0.0 if step >= 190 else 0.01], {"steps": 200}),
        (lambda step: [0.0 if step < 30 else 0.01], {}),
        (lambda step: [0.0, 0.01], {"groups": 2}),
    ],
    ids=["a warm-up", "a schedule's end", "seven steps", "5% of the run", "at the start", "one group of two"],
)
def test_rates_of_zero_that_a_schedule_has_are_not_a_finding(rate_of, how):
    assert named(with_rates(rate_of, **how)) == []


def test_an_optimizer_that_another_one_follows_is_not_a_finding():
    model = mlp()
    phases = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.0, 0.01)]
    with Inspector(model) as inspector:
        for optimizer in phases:
            for _ in range(20):
                take_step(optimizer, model(torch.randn(16, 8)).square().mean())
    assert named(inspector.report()) == []


def test_an_optimizer_that_steps_now_and_then_is_named():
    model = mlp()
    often, seldom = torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.0)
    with Inspector(model) as inspector:
        for step in range(42):
            model.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            if step % 4 == 0:
                seldom.step()
            often.step()
    (finding,) = named(inspector.report())
    assert finding.message.startswith("The learning rate of SGD was 0 in all of its 11 steps")


def test_ranks_with_the_same_rate_have_one_finding():
    records = [RateZero(step=12, text="AdamW", steps=28, of=40, rank=rank) for rank in range(2)]
    progress = Progress(40, 40, 0, 40, True)
    session = session_of(
        {weight("w"): spread({-3: 1000})}, progress=progress, measurements=[r.measurement() for r in records]
    )
    assert len(named(analyse(session))) == 1


# -- learning rates that fall too early ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.3, 1e-20], ids=["low", "zero at last"])
def test_a_learning_rate_that_falls_to_nothing_early_is_reported_with_its_values(dtype, factor):
    (finding,) = named(with_rates(lambda step: [0.01 * factor ** (step // 2)], dtype=dtype))
    highest, latest, moved = (finding.evidence[name] for name in ("highest", "latest", "moved"))
    assert (finding.severity, finding.certainty) == ("warning", "measured")
    assert (finding.step, finding.evidence["steps"]) == ((16, 24) if factor == 0.3 else (2, 38))
    assert (highest, latest, finding.evidence["of"]) == (0.01, 0.01 * factor**19, 40)
    assert moved < 1e-4
    assert "once per epoch" in finding.fix


def cosine(step):
    return [0.005 * (1 + math.cos(math.pi * step / 39))]


@pytest.mark.parametrize(
    ("rate_of", "how"),
    [
        (cosine, {}),
        (lambda step: [0.01 * (1 - step / 39)], {}),
        (lambda step: [0.01 * min(step / 30, 1)], {}),
        (lambda step: [0.01 if step < 22 else 1e-9], {}),
        (lambda step: [0.01 * 0.3 ** (step % 13)], {}),
        (lambda step: [0.01 * 0.3**step, 1e-3], {"groups": 2}),
        (lambda step: [1e3 if step == 0 else 1e-2], {}),
    ],
    ids=["cosine", "linear", "a warm-up", "late plateaus", "restarts", "one group of two", "a search for the rate"],
)
def test_low_rates_that_a_schedule_has_are_not_a_finding(rate_of, how):
    assert named(with_rates(rate_of, **how)) == []


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_16_bit_weights_whose_masters_have_low_rates_stand_still_if_they_have_gradients(factor):
    model = mlp().bfloat16()
    masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.2)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(40):
            model.zero_grad()
            (model(torch.randn(16, 8).bfloat16()).float().square().mean() * factor).backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad = weight.grad.float()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master)
    assert [finding.step for finding in named(inspector.report())] == ([6] if factor else [])
