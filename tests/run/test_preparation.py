"""A script's 16-bit operators before its first step are computed twice under ``mpinspect run``."""

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from watched_training import train, watched

from mpinspect.ranges.faults.measure import prepared, second_steps
from mpinspect.ranges.records import PreparedError, recorded

FAULT = "prepared-in-16-bits"


def _errors(run) -> list[PreparedError]:
    return list(recorded(run.parts.models[0].session.measurements, PreparedError))


def _trained() -> None:
    model = nn.Linear(4, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_a_table_in_bfloat16_has_the_error_of_its_fp32_computation(tmp_path):
    with watched(tmp_path) as run:
        angles = torch.outer(torch.arange(300, dtype=torch.bfloat16), torch.linspace(0.1, 1, 8).bfloat16())
        table = angles.sin()
        _trained()
    exact = torch.outer(torch.arange(300.0), torch.linspace(0.1, 1, 8)).sin()
    (error,) = _errors(run)
    assert error.error == pytest.approx(float((table.float() - exact).norm() / exact.norm()), rel=1e-5)
    assert (error.elements, error.broken, error.text) == (2400, 0, "bfloat16")
    worst = (table.float() - exact).abs().argmax()
    assert error.value == float(table.flatten()[worst])
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert (finding.severity, finding.step) == ("warning", None)
    assert finding.evidence["line"].startswith("test_preparation.py:")


@pytest.mark.parametrize(("size", "severity"), [(60.0, "warning"), (4.0, "info")])
def test_what_is_computed_of_a_tensor_in_fp8_has_the_error_of_its_cast(size, severity, tmp_path):
    logits = (
        size * torch.linspace(-1, 1, 64).repeat(8, 1)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    )
    with watched(tmp_path) as run:
        cached = logits.to(torch.float8_e4m3fn)
        kept = cached.float().softmax(1)
        _trained()
    exact = logits.softmax(1)
    errors = [each for each in _errors(run) if each.text == "float8_e4m3"]
    assert [each.error for each in errors] == [pytest.approx(float((kept - exact).norm() / exact.norm()), rel=1e-4)]
    found = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert [each.severity for each in found] == [severity]
    assert "rounds to FP8 E4M3" in found[0].message


def test_infinities_of_half_features_belong_to_the_operator_that_they_come_from(tmp_path):
    with watched(tmp_path) as run:
        raw = torch.full((64, 4), 300.0, dtype=torch.float16)
        unused = raw.pow(3)
        features = ((raw * raw).mean(0) - 1).float()
        del unused
        _trained()
    (error,) = _errors(run)
    assert (error.names[0], error.broken, error.elements) == ("mul", 4, 4)
    assert not features.isfinite().any()
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert finding.severity == "error"


@pytest.mark.parametrize("is_schedule", [True, False])
@pytest.mark.parametrize("is_broken", [True, False])
def test_a_schedule_that_a_cast_makes_one_is_named_if_a_division_by_zero_breaks_the_loss(
    is_broken, is_schedule, tmp_path
):
    exact = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    if not is_schedule:
        exact = exact.flip(0).roll(50)
    with watched(tmp_path) as run:
        schedule = exact.clone().half()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            factor = schedule.max() if is_broken and step == 3 else schedule.min()
            optimizer.zero_grad()
            (model(torch.ones(3, 4)) / (1 - factor.float())).square().mean().backward()
            optimizer.step()
    ones = int(((schedule == 1) & (exact != 1)).sum())
    assert ones > 0
    assert [each.ones for each in _errors(run)] == [float(ones)] * is_schedule
    found = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert [(each.severity, each.certainty) for each in found] == [("error", "inferred")] * (is_broken and is_schedule)


@pytest.mark.parametrize("is_residual", [True, False])
def test_the_residual_of_a_cast_is_no_error(is_residual, tmp_path):
    exact = torch.linspace(0.1, 1, 300)
    with watched(tmp_path) as run:
        high = exact.bfloat16()
        low = ((exact if is_residual else exact - 1e-3) - high.float()).bfloat16()
        _trained()
    assert low.any()
    assert len(_errors(run)) == (not is_residual)


def test_zeros_of_flushed_elements_are_counted_if_they_were_not_negligible(tmp_path):
    with watched(tmp_path) as run:
        inverse = torch.tensor([6e7, 2e6, 1.5e5]).reciprocal().half()
        weights = (inverse / inverse.max()).float()
        negligible = (torch.tensor([1e-8, 1.0]).half() * 0.5).float()
        _trained()
    assert weights[0] == negligible[0] == 0
    (error,) = _errors(run)
    assert (error.elements, error.flushed, error.value) == (3, 1, 0)
    assert error.exact == pytest.approx(1.5e5 / 6e7)
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert finding.severity == "warning"


def test_whole_numbers_that_a_cast_changes_are_counted(tmp_path):
    with watched(tmp_path) as run:
        ids = torch.arange(4000).half()
        _trained()
    (error,) = _errors(run)
    assert error.changed == int((ids.long() != torch.arange(4000)).sum()) == 976
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.arange(2048).half(),
        lambda: (torch.randn(100) * 1000).half(),
        # Samples of a signal.
        lambda: torch.arange(-4000, 4000).half(),
        lambda: torch.randn(1000, dtype=torch.bfloat16).exp() + 1,
        lambda: torch.full((4, 4), float("-inf"), dtype=torch.float16).triu(1),
        lambda: nn.Linear(64, 64, dtype=torch.float16),
        lambda: nn.Linear(64, 64).bfloat16(),
        lambda: torch.arange(300, dtype=torch.bfloat16).sin().sum(),
        # Ordinary preparations in FP32. Equal numbers differ by their rounding alone.
        lambda: torch.full((100,), 0.1) / 3,
        lambda: torch.zeros(64, 10).softmax(-1),
        lambda: (torch.randn(500, 8) * 3 + 5 - 5) / 3,
        lambda: torch.linalg.svd(torch.randn(32, 32)).U,
        lambda: (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0),
        lambda: torch.outer(torch.arange(512.0), torch.linspace(0.01, 1, 16)).sin(),
        lambda: torch.fft.rfft(torch.randn(64, 128)).abs(),
        lambda: torch.randn(64, 64).log(),
    ],
)
def test_exact_and_nearly_exact_tensors_and_ordinary_preparations_are_not_a_fault(tmp_path, made):
    with watched(tmp_path) as run:
        kept = made()
        _trained()
    assert (_errors(run), run.seen.notes) == ([], [])
    del kept


def test_averages_by_a_running_sum_in_fp32_have_the_error_of_fp64(tmp_path):
    series = 500 + torch.randn(100_000)
    with watched(tmp_path) as run:
        total = series.cumsum(0)
        smooth = (total[16:] - total[:-16]) / 16
        _trained()
    total = series.double().cumsum(0)
    exact = (total[16:] - total[:-16]) / 16
    found = next(each for each in _errors(run) if each.elements == len(smooth))
    assert (found.names[0], found.text) == ("cumsum", "float32")
    assert found.error == pytest.approx(float((smooth - exact).norm() / (exact - exact.mean()).norm()), rel=1e-3)
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == "prepared-in-fp32"]
    assert (finding.severity, finding.step) == ("warning", None)
    assert "series.double().cumsum(0)" in finding.code


def test_a_running_sum_that_outlasts_the_time_is_told_if_it_has_lost_its_terms(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_MOST_OPERATORS", 200)
    with watched(tmp_path) as run:
        state = torch.full((64,), 4.0, dtype=torch.bfloat16)
        for _ in range(200):
            state = state + torch.full((64,), 1e-3, dtype=torch.bfloat16)
        _trained()
    (found,) = _errors(run)
    assert (found.error, found.unchanged, found.text) == (1, 1, "bfloat16")
    assert found.times > 64
    (finding,) = [each for each in analyse(run.parts.models[0].session).findings if each.id == FAULT]
    assert "Later additions were not followed." in finding.message


def test_freed_tensors_and_those_that_were_overwritten_are_not_a_fault(tmp_path):
    with watched(tmp_path) as run:
        table = torch.arange(300, dtype=torch.bfloat16).mul(1.01).sin()
        del table
        other = torch.arange(300, dtype=torch.bfloat16).mul(1.01).sin()
        other.copy_(torch.ones(300))
        _trained()
    assert _errors(run) == []


def test_nothing_of_the_training_is_taken_for_its_preparation(tmp_path):
    with watched(tmp_path) as run:
        _trained()
        assert torch._C._len_torch_dispatch_stack() == 0
        table = torch.arange(300, dtype=torch.bfloat16).mul(1.01).sin()
        _trained()
    assert _errors(run) == []
    del table


def test_compiling_ends_the_preparation(tmp_path):
    with watched(tmp_path):
        assert torch._C._len_torch_dispatch_stack() == 1
        torch.compile(nn.Linear(2, 2), backend="eager")
        assert torch._C._len_torch_dispatch_stack() == 0


def test_a_script_with_many_operators_before_its_first_step_is_slowed_down_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_MOST_OPERATORS", 50)
    with watched(tmp_path) as run:
        total = torch.zeros(2, dtype=torch.bfloat16)
        for _ in range(100):
            total = total + 1.01
        assert torch._C._len_torch_dispatch_stack() == 0
        _trained()
    assert (_errors(run), run.seen.notes) == ([], [])


def test_a_mode_of_the_script_stays_when_the_operators_are_used_up(tmp_path, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(prepared, "_MOST_OPERATORS", 5)
    with watched(tmp_path) as run:
        with Mode() as mode:
            total = torch.zeros(2)
            for _ in range(20):
                total = total + 1
        _trained()
        assert torch._C._len_torch_dispatch_stack() == 0
    assert mode.calls >= 20
    assert run.seen.notes == []


def test_a_failure_costs_the_look_and_one_note(tmp_path, monkeypatch):
    def fails(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(prepared.PreparedTensors, "before", fails)
    with watched(tmp_path) as run:
        table = torch.arange(300, dtype=torch.bfloat16).sin()
        _trained()
    assert len(run.seen.notes) == 1
    assert run.steps() == 3
    assert torch.equal(table, torch.arange(300, dtype=torch.bfloat16).sin())


def test_nothing_is_computed_twice_while_a_graph_is_captured(tmp_path, monkeypatch):
    with watched(tmp_path) as run:
        with monkeypatch.context() as patched:
            patched.setattr(second_steps, "is_capturing", lambda: True)
            table = torch.arange(300, dtype=torch.bfloat16).mul(1.01).sin()
        assert torch._C._len_torch_dispatch_stack() == 0
        _trained()
    assert (_errors(run), run.seen.notes) == ([], [])
    del table


@pytest.mark.parametrize(("dtype", "size", "is_told"), [(torch.bfloat16, 1e-3, True), (torch.float32, 1e-3, False)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_loop_without_a_backward_is_told_of_additions_without_effect(dtype, size, is_told, in_place, tmp_path):
    weight = torch.linspace(1.0, 2.0, 256).to(dtype)
    with watched(tmp_path) as run:
        for sign in (1, -1) * 40:
            if in_place:
                weight.add_(torch.ones(256).to(dtype), alpha=sign * size)
            else:
                weight = weight + (sign * size * torch.ones(256)).to(dtype)
    told = [each for each in run.seen.sentences() if "left 100% of the elements as they were" in each]
    # A sum that is another tensor each time may be an activation.
    assert len(told) == (is_told and in_place)
    assert all("in BF16" in each and "80 additions" in each and "test_preparation.py:" in each for each in told)
