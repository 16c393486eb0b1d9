"""Steps long after the first are computed twice as well."""

from __future__ import annotations

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


def _steps_of(tmp_path: Path, steps: int, *options: str) -> list[int]:
    """Return the steps in which the buffer was found frozen."""
    folder = tmp_path / "script"
    write(folder, SCRIPT.replace("STEPS", str(steps)))
    ended = watched(folder, "train.py", options=options, forked=True)
    assert ended.status == 0, ended.err
    report = json.loads((tmp_path / RUN_DIR / "report.json").read_text())
    findings = report["models"][0]["ranges"]["findings"]
    return [each["step"] for each in findings if each["id"] == "buffer-stops-changing"]


def test_a_count_that_saturates_after_the_first_steps_is_found_in_a_later_one(tmp_path: Path) -> None:
    assert _steps_of(tmp_path, 105) == [101]


@pytest.mark.parametrize(("steps", "options"), [(50, ()), (105, ("--no-lint",)), (105, ("--max-overhead", "0.9"))])
def test_a_short_run_and_one_without_later_second_computations_find_nothing(
    tmp_path: Path, steps: int, options: tuple[str, ...]
) -> None:
    assert _steps_of(tmp_path, steps, *options) == []
