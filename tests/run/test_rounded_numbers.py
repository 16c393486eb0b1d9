"""Integers that become equal when rounded to 16 bits are reported only where an operator uses their differences."""

import json
import sys

import launched
import pytest
import torch
from agreeing_reports import contradictions
from models import Of
from torch import nn
from trainings import take_step
from watched_training import watched

from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.faults.measure.rounded_numbers import RoundedNumbers

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _nothing_was_compiled_before():
    """Clear Dynamo's counters: no step is recorded if anything was compiled."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


def featured(feature):
    """Compute a function of the rows without a gradient, which is not part of the output."""
    forward = lambda self, x: x + self.proj(feature(x).float().mean().clamp(-1, 1).reshape(1, 1))  # noqa: E731
    return Of(forward, proj=nn.Linear(1, 4))


def trained(tmp_path, feature, rows=512, steps=3):
    """Train a model whose module "1" computes the feature; return its report."""
    torch.manual_seed(3)
    with watched(tmp_path) as run:
        model = nn.Sequential(nn.Linear(4, 4), featured(feature))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            take_step(optimizer, model(torch.randn(rows, 4)).square().mean())
    assert run.seen.notes == []
    return analyse(run.parts.models[0].session)


def found(report):
    return [finding for finding in report.findings if finding.id == "positions-collapse"]


def hours(x):
    return torch.arange(len(x)) + 4096


def mask_of(x):
    return torch.ones(len(x), 2)


def through_autocast(x):
    """Return the outer product of FP32 positions and frequencies, which autocast computes in BF16."""
    with torch.autocast("cpu", BF16):
        positions = hours(x).float()[None, :, None]
        return torch.cat((positions @ torch.tensor([[[1.0, 0.1]]]),) * 2, -1).sin()[0]


def of_complex(angles):
    return torch.view_as_real(torch.polar(torch.ones(len(angles)), angles.float()))


def in_place(x):
    made = torch.zeros(len(x), 2, dtype=BF16)
    made[:, 0] = hours(x)
    return made.mul_(0.5).sin()


def seconds(x):
    """Return timestamps one hour apart, in BF16."""
    return (1_700_000_000 + 3600 * torch.arange(len(x))).to(BF16)


def first_of(x, numbers):
    """Return, for each number, the index of the first number that is not larger."""
    return (numbers[:, None] >= numbers[None, :]).float().argmax(1)


#: The feature; the distinct numbers before and after rounding; the largest number; the operator that uses differences.
FAULTS = {
    "a cast": (lambda x: (hours(x).to(BF16) * 0.26).sin(), 512, 17, 4607, "sine"),
    "a cast to FP16": (lambda x: (hours(x).half() / 24).cos(), 512, 129, 4607, "sine"),
    "integers times BF16": (lambda x: (hours(x) * torch.ones((), dtype=BF16)).sin(), 512, 17, 4607, "sine"),
    "rounded, then widened": (lambda x: (hours(x).to(BF16).float() * 0.26).sin(), 512, 17, 4607, "sine"),
    "whole floats": (lambda x: (hours(x).double().to(BF16)).sin(), 512, 17, 4607, "sine"),
    "autocast": (through_autocast, 512, 17, 4607, "sine"),
    "angles of complex numbers": (lambda x: of_complex(hours(x).to(BF16)), 512, 17, 4607, "sine"),
    "written in place": (in_place, 512, 17, 4607, "sine"),
    "timestamps": (lambda x: (seconds(x) / 86400).sin(), 512, 1, 1_701_839_600, "sine"),
    "an arange": (lambda x: torch.arange(len(x), dtype=BF16).mul(0.1).sin(), 512, 385, 511, "sine"),
    "an arange by steps": (lambda x: torch.arange(1000, 2024, 2, dtype=BF16).sin(), 512, 132, 2022, "sine"),
    "a cumsum": (lambda x: mask_of(x).to(BF16).cumsum(0)[:, 0].long() - 1, 512, 384, 512, "integers"),
    "a cumsum of booleans": (lambda x: mask_of(x).bool().cumsum(0, dtype=BF16)[:, 0].int(), 512, 384, 512, "integers"),
    "slots": (lambda x: (mask_of(x).to(BF16).cumsum(0) * mask_of(x)).sum(-1).long(), 512, 384, 512, "integers"),
    "ids there and back": (lambda x: hours(x).to(BF16).long(), 512, 17, 4607, "integers"),
    "a causal mask": (lambda x: first_of(x, torch.arange(len(x)).to(BF16)), 512, 385, 511, "compared"),
    "lengths and an arange": (
        lambda x: (torch.arange(512, dtype=BF16)[None] < torch.tensor([300.0, 301.0])[:, None]).sum(1),
        512,
        385,
        511,
        "compared",
    ),
    "distances": (lambda x: (hours(x).to(BF16)[:, None] - hours(x).to(BF16)[None])[:, 0], 512, 17, 4607, "subtracted"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_rounded_numbers_whose_differences_are_used_are_found(tmp_path, what):
    feature, before, after, largest, used = FAULTS[what]
    report = trained(tmp_path, feature)
    (finding,) = found(report)
    assert (finding.severity, finding.certainty, finding.layer, finding.step) == ("warning", "measured", "1", 1)
    assert f"whole numbers up to {largest}" in finding.message
    assert f"keeps {after} of these {before} distinct" in finding.message
    assert used in finding.message
    assert "cumsum" not in finding.message or "cumsum(mask.long()" in finding.code
    assert contradictions(report) == []
    assert "Healthy" not in str(report.verdict)


#: Tables of 512 hours that a script has rounded before its training.
SMALL = torch.arange(200).to(BF16)
TABLE, FP16_TABLE = (4096 + torch.arange(512)).to(BF16), (4096 + torch.arange(512)).half()
#: Minutes that were stored in 16 bits, and are in FP32 now.
MINUTES, IDS = torch.arange(0, 6000, 7).half().float(), torch.arange(0, 900, 3).to(BF16).float()
OLD = {
    "stored in FP16": (lambda x: (MINUTES * 0.1).sin(), 6000, FP16, "sine"),
    "ids stored in BF16": (lambda x: IDS.long(), 896, BF16, "integers"),
    "a phase": (lambda x: (TABLE % 24).mul(0.26).sin(), 4608, BF16, "sine"),
    "angles": (lambda x: (TABLE[:, None] * torch.ones(1, 2, dtype=BF16)).cos(), 4608, BF16, "sine"),
    "a batch of rows": (lambda x: torch.stack([*TABLE[:64]]).sin(), 4160, BF16, "sine"),
    "ids": (lambda x: FP16_TABLE[torch.randperm(512)].long(), 4608, FP16, "integers"),
}


@pytest.mark.parametrize("what", OLD)
def test_whole_numbers_that_were_rounded_before_the_step_are_inferred(tmp_path, what):
    feature, largest, dtype, used = OLD[what]
    (finding,) = found(trained(tmp_path, feature))
    assert (finding.severity, finding.certainty, finding.layer) == ("warning", "inferred", "1")
    assert f"whole numbers up to {largest} are" in finding.message
    held = torch.arange(largest + 1).to(dtype).double().unique()
    assert f"keeps {len(held)} of these {largest + 1} distinct" in finding.message
    assert used in finding.message


def fp32_angles(x):
    with torch.autocast("cpu", BF16):
        positions = hours(x)
        with torch.autocast("cpu", enabled=False):
            angles = positions.float()[:, None] @ torch.tensor([[1.0, 0.1]])
        return angles.sin().to(BF16)


HEALTHY = {
    "positions below 257": lambda x: (torch.arange(len(x)) % 257).to(BF16).sin(),
    "positions up to 2048 in FP16": lambda x: torch.arange(1537, 2049).half().sin(),
    "angles in FP32 under autocast": fp32_angles,
    "hours of the day": lambda x: (hours(x) % 24).to(BF16).mul(0.26).sin(),
    "bytes": lambda x: torch.randint(0, 256, (len(x),), dtype=torch.uint8).to(BF16).cos(),
    "masks back to integers": lambda x: mask_of(x).to(BF16).long()[:, 0],
    "one-hots back to integers": lambda x: nn.functional.one_hot(hours(x) % 5).to(BF16).long().argmax(-1),
    "quantised on purpose": lambda x: (x * 20).round().clamp(-128, 127).detach().to(BF16).to(torch.int8)[:, 0],
    "a cumsum that is exact": lambda x: mask_of(x)[:256].to(BF16).cumsum(0)[:, 0].long(),
    "even numbers": lambda x: torch.arange(256, 512, 2).to(BF16).sin(),
    "lengths to divide by": lambda x: x.detach().to(BF16)[:, 0] / hours(x).to(BF16),
    "a normalised mask": lambda x: 1.0 / mask_of(x).to(BF16).cumsum(0)[:, 0],
    "whole targets": lambda x: (hours(x).to(BF16) - x.detach().to(BF16)[:, 0]).square() / 1e6,
    "a quantile of whole targets": lambda x: (hours(x).to(BF16) > x.detach().to(BF16)[:, 0]).float(),
    "a single count": lambda x: torch.tensor(4607).to(BF16).sin(),
    "random numbers that aren't whole": lambda x: (4096 + 500 * torch.rand(len(x))).to(BF16).sin(),
    "gradients flow": lambda x: x[:, 0].add(4096).round().to(BF16).sin(),
    "every hour in minutes": lambda x: torch.arange(0.0, 8192, 60).mul(0.1).sin(),
    "minutes in FP32": lambda x: torch.arange(0.0, 8192, 7).mul(0.1).sin(),
    "an old table of small numbers": lambda x: SMALL.sin(),
    "an old table that is compared": lambda x: (TABLE[:, None] > TABLE[None]).float(),
    "old weights": lambda x: x.detach().to(BF16) * TABLE[:, None],
    "the lookup of a table": lambda x: torch.ones(9000, dtype=BF16)[hours(x)],
    "infinities": lambda x: torch.full((len(x),), -torch.inf).masked_fill(hours(x) > 4200, 0).to(BF16).exp(),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_exact_numbers_and_unused_differences_are_not_reported(tmp_path, what):
    assert found(trained(tmp_path, HEALTHY[what])) == []


@pytest.mark.parametrize("are_called_first", [True, False])
def test_of_several_models_the_one_that_rounds_is_named(tmp_path, are_called_first):
    """A model that is first called within the recorded step is missed, without blaming another model."""
    with watched(tmp_path) as run:
        models = [
            nn.Sequential(nn.Linear(4, 4), featured(feature))
            for feature in (lambda x: hours(x).float().sin(), lambda x: hours(x).to(BF16).sin())
        ]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        if are_called_first:
            for model in models:
                model(torch.randn(512, 4))
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                take_step(optimizer, model(torch.randn(512, 4)).square().mean())
    whole, rounded = (analyse(model.session) for model in run.parts.models)
    assert found(whole) == []
    assert [finding.layer for finding in found(rounded)] == (["1"] if are_called_first else [])


def test_weights_and_random_numbers_equal_an_unwatched_runs(tmp_path):
    def weights(is_watched):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), featured(FAULTS["slots"][0]), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            take_step(optimizer, model(torch.randn(512, 4)).square().mean())
        return [*model.parameters(), torch.rand(3)]

    with watched(tmp_path) as run:
        seen = weights(True)
    assert found(analyse(run.parts.models[0].session))
    assert all(torch.equal(a, b) for a, b in zip(seen, weights(False), strict=True))


def test_an_internal_error_disables_only_this_check(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(RoundedNumbers, "_look", fail)
    with watched(tmp_path, lint=True) as run:
        model = nn.Sequential(nn.Linear(4, 4), featured(FAULTS["a cast"][0]), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.randn(512, 4)).square().mean().backward()
            optimizer.step()
    assert {one.module for one in run.parts.matmuls.matmuls} == {"0", "1.proj", "2"}
    assert run.parts.matmuls.notes == ()
    assert [note for note in run.seen.notes if "planted" in note]


def test_the_verdict_on_a_runs_page_names_the_rounding(tmp_path):
    folder = tmp_path / "work"
    launched.write(
        folder,
        """
import torch
from torch import nn

class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 8)

    def forward(self, hour):
        angle = hour.to(torch.bfloat16) * (6.2831853 / 24)
        return self.proj(torch.stack([angle.sin(), angle.cos()], -1))

model = nn.Sequential(Clock(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(7000 + torch.randperm(256)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    ended = launched.watched(folder, "train.py", forked=True)
    text = " ".join(ended.err.split())
    assert "Warning: In '0' (Clock, train.py:" in text
    assert "whole numbers up to 7255 are in BF16, which keeps 9 of these 256 distinct" in text
    assert "Healthy" not in text
    (model,) = json.loads((tmp_path / launched.RUN_DIR / "report.json").read_text())["models"]
    (finding,) = [each for each in model["ranges"]["findings"] if each["id"] == "positions-collapse"]
    assert (finding["layer"], finding["step"]) == ("0", 1)
