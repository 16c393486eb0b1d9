"""Constants that a script makes in 16 bits before its first step are computed twice under ``mpinspect run``."""

from __future__ import annotations

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from watched_training import watched

FP16 = torch.float16


def constant_of(tmp_path, make, mode=None):
    """Make a constant and train with it; return the constant and the finding on an operator that overflows, if any."""
    with watched(tmp_path) as run:
        torch.manual_seed(0)
        if mode is not None:
            mode.__enter__()
        constant = make()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            (model(torch.randn(8, 4)).square().mean() + 0 * constant.float().nan_to_num().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        left = torch._C._len_torch_dispatch_stack()
        if mode is not None:
            mode.__exit__(None, None, None)
    found = [each for each in analyse(run.parts.models[0].session).findings if each.id == "overflow-in-operator"]
    return constant, left, *found


def counts():
    return 1 / torch.tensor([70_000, 500]).to(FP16)


def logarithms():
    return (torch.tensor([0.5, 1e-9]).to(FP16) + 1e-8).log()


@pytest.mark.parametrize(
    ("make", "operator"), [(counts, "a cast in test_set_up.py:"), (logarithms, "log in test_set_up")]
)
def test_an_infinity_of_a_constant_is_named_with_its_line(tmp_path, make, operator):
    constant, left, found = constant_of(tmp_path, make)
    assert torch.equal(constant, make())
    assert left == 0
    assert found.message.startswith(f"Before the first step, {operator}")
    assert (found.severity, found.code) == ("warning", "")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([0.0, -1e9]).to(FP16),
        lambda: torch.tensor([0.0, float("inf")]).to(FP16),
        lambda: torch.tensor([70_000, 500]).to(torch.bfloat16),
        lambda: torch.tensor([70_000.0]).log(),
        lambda: torch.randn(8).to(FP16),
    ],
    ids=["a mask", "infinite before", "BF16", "FP32", "random"],
)
def test_constants_that_16_bits_hold_are_not_reported(tmp_path, make):
    _, left, *found = constant_of(tmp_path, make)
    assert (left, found) == (0, [])


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_script_stays(tmp_path):
    constant, left, *_ = constant_of(tmp_path, counts, mode=Passing())
    # Ours lies below it and passes everything on.
    assert (left, bool(constant[0] == 0)) == (2, True)
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)


def test_a_script_without_a_model_leaves_no_mode(tmp_path):
    with watched(tmp_path):
        counts()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0


class Schedule(nn.Module):
    """Divides by the distance of a cast table from one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.tensor([0.5, 0.9999]))
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) / (1 - self.kept)


def test_the_exact_values_of_a_cast_buffer_show_where_it_was_rounded(tmp_path):
    with watched(tmp_path) as run:
        torch.manual_seed(0)
        model = Schedule().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            model(torch.randn(8, 2).bfloat16()).float().nan_to_num(0, 0, 0).square().mean().backward()
            optimizer.zero_grad()
            optimizer.step()
    found = {each.id: each for each in analyse(run.parts.models[0].session).findings}
    assert "an earlier operator had rounded away the value" in found["overflow-in-operator"].message
    assert "breaks-in-fp32-too" not in found
