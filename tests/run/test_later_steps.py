"""Steps long after the first are computed twice as well."""

import json
from pathlib import Path

import pytest
from launched import RUN_DIR, watched, write

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.tensor(200.0, dtype=torch.bfloat16))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _steps_of(tmp_path: Path, steps: int, *options: str, first: float = 200.0) -> list[int]:
    """Return the steps in which the buffer, a count from ``first`` on, was found frozen."""
    folder = tmp_path / "script"
    write(folder, SCRIPT.replace("STEPS", str(steps)).replace("200.0", str(first)))
    ended = watched(folder, "train.py", options=options, forked=True)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / RUN_DIR / "report.json").read_text())
    findings = report["models"][0]["ranges"]["findings"]
    return [each["step"] for each in findings if each["id"] == "buffer-stops-changing"]


@pytest.mark.parametrize(("first", "steps", "found"), [(200.0, 105, 101), (240.0, 40, 31)])
def test_a_count_that_saturates_after_the_first_steps_is_found_in_a_later_one(
    tmp_path: Path, first: float, steps: int, found: int
) -> None:
    assert _steps_of(tmp_path, steps, first=first) == [found]


OVERFLOWING = """
import torch
from torch import nn


class Raised(nn.Module):
    def forward(self, x):
        return x.half().pow(4).float()


model = nn.Sequential(nn.Linear(4, 4), Raised())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(14):
    x = torch.full((8, 4), 100.0 if step in BROKEN else 0.1)
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("broken", "measured"), [((3, 9, 10), [10]), ((3, 6), [6]), ((3, 4, 9), [4]), ((3,), [])])
def test_steps_after_an_infinity_are_computed_twice_until_one_breaks_again(
    tmp_path: Path, broken: tuple[int, ...], measured: list[int]
) -> None:
    folder = tmp_path / "script"
    write(folder, f"import torch\ntorch.manual_seed(0)\nBROKEN = {broken}\n" + OVERFLOWING)
    ended = watched(folder, "train.py", forked=True)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / RUN_DIR / "report.json").read_text())
    findings = report["models"][0]["ranges"]["findings"]
    named = [each["message"] for each in findings if each["id"] == "overflow-in-operator"]
    assert ["pow overflows" in message and f"step {measured[0]}" in message for message in named] == [True] * len(
        measured
    )


@pytest.mark.parametrize(
    ("steps", "options", "found"),
    # A count of 200 that grows by 1 a step stops at 256: within 105 steps, which the first steps already show.
    [(50, (), []), (105, ("--no-lint",), []), (105, ("--max-overhead", "0.9"), [1])],
)
def test_without_later_second_computations_only_the_first_steps_are_judged(
    tmp_path: Path, steps: int, options: tuple[str, ...], found: list[int]
) -> None:
    assert _steps_of(tmp_path, steps, *options) == found


RESUMED = """
import copy

import torch
from torch import nn

torch.manual_seed(0)


class Averaging(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            square = self.state[weight].setdefault("square", torch.ones_like(weight, dtype=torch.float32))
            square.mul_(0.999).add_(weight.grad.float() ** 2, alpha=0.001)
            weight -= 0.01 * weight.grad / square.sqrt()


model = nn.Linear(4, 2).bfloat16()
state = {}
for phase in range(PHASES):
    optimizer = Averaging(model.parameters())
    if state:
        optimizer.load_state_dict(state)
    for step in range(4):
        model(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    del optimizer
"""


@pytest.mark.parametrize(("phases", "steps"), [(1, []), (2, [5])])
def test_an_early_step_of_a_resumed_optimizer_is_computed_twice(tmp_path: Path, phases: int, steps: list[int]) -> None:
    """``load_state_dict`` casts the FP32 states of BF16 weights to BF16."""
    folder = tmp_path / "script"
    write(folder, RESUMED.replace("PHASES", str(phases)))
    ended = watched(folder, "train.py", forked=True)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / RUN_DIR / "report.json").read_text())
    found = [each for each in report["models"][0]["ranges"]["findings"] if each["id"] == "buffer-stops-changing"]
    assert [each["step"] for each in found] == steps
    assert all("in Averaging's step" in each["message"] and "'square'" in each["message"] for each in found)


MERGED = """
import torch
from torch import nn

torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("base", 1 + torch.rand(8, 8).bfloat16())
        self.norm = nn.BatchNorm1d(8)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.norm(x @ self.base.float().t() + x @ self.down.t() @ self.up.t())

    @torch.no_grad()
    def merge(self):
        self.base.add_((self.up @ self.down).bfloat16())
        self.up.zero_()


model = Adapted()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(36):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        model.merge()
        OPTIMIZER
"""


@pytest.mark.parametrize("optimizer", ["", "optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)"])
def test_a_buffer_that_is_written_in_regular_steps_is_judged_in_one_of_them(tmp_path: Path, optimizer: str) -> None:
    """Statistics that every step writes do not count as rarer work; an optimizer for each phase is followed by the next one."""
    folder = tmp_path / "script"
    write(folder, MERGED.replace("OPTIMIZER", optimizer))
    ended = watched(folder, "train.py", forked=True)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / RUN_DIR / "report.json").read_text())
    found = [each for each in report["models"][0]["ranges"]["findings"] if each["id"] == "buffer-stops-changing"]
    assert ["'base'" in each["message"] for each in found] == [True]
    assert found[0]["step"] % 4 == 0
