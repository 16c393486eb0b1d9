"""Dtypes that become narrower in a run: of the weights between two steps, and of states that an optimizer loads."""

import copy
import gc

import pytest
import torch
from agreeing_reports import contradictions
from torch import nn
from trainings import take_step

from mpinspect import Inspector
from mpinspect.ranges.analysis.report import RangeReport


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def train(model, optimizer, change=lambda step, model: None, after_backward=lambda step, model: None) -> RangeReport:
    with Inspector(model) as inspector:
        for step in range(24):
            change(step, model)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            loss.backward()
            after_backward(step, model)
            optimizer.step()
    report = inspector.report()
    assert contradictions(report) == []
    return report


def named(report: RangeReport, id: str):
    return [finding for finding in report.findings if finding.id == id]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# Step 11 is not among the measured steps 0..3, 4, 8, 16.
@pytest.mark.parametrize("step", [4, 11])
def test_a_live_model_that_is_converted_is_named_with_its_step(step):
    model = mlp()
    report = train(model, sgd(model), lambda now, model: model.bfloat16() if now == step else None)
    (finding,) = named(report, "model-converted")
    assert (finding.severity, finding.step) == ("warning", step)
    assert f"Since step {step} the weights are in BF16: SGD stepped them in FP32 before." in finding.message
    assert f"between steps {step - 1} and {step} converted" in finding.message
    assert "below 2^-9 of its weight" in finding.message
    assert finding.evidence["count"] == finding.evidence["of"] == 4
    assert finding.code.endswith("exported = copy.deepcopy(model)\nexported.to(torch.bfloat16)")
    assert "model-converted" in [each.id for each in report.findings if each.severity != "info"][:1]


def test_a_part_that_is_converted_is_named_at_the_next_measured_step():
    model = mlp()
    report = train(model, sgd(model), lambda step, model: model[2].bfloat16() if step == 11 else None)
    (finding,) = named(report, "model-converted")
    assert (finding.layer, finding.step) == ("2.weight", 16)
    assert "2 of 4 weights, in '2' (Linear), are in BF16" in finding.message


def restored(step, model):
    if step == 11:
        model.bfloat16()
        model.float()


def widened(step, model):
    if step == 11:
        model.double().float()


def exported(step, model):
    if step == 11:
        copy.deepcopy(model).bfloat16()


@pytest.mark.parametrize("change", [restored, widened, exported])
def test_weights_in_fp32_at_each_step_are_not_a_finding(change):
    model = mlp()
    assert named(train(model, sgd(model), change), "model-converted") == []


def test_a_model_in_bf16_from_the_start_is_not_a_finding():
    model = mlp(torch.bfloat16)
    assert named(train(model, sgd(model)), "model-converted") == []


def test_a_model_that_becomes_wider_is_not_a_finding():
    model = mlp(torch.bfloat16)
    report = train(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda step, model: step == 11 and model.float()
    )
    assert named(report, "model-converted") == []


def in_two_phases(optimizer_of):
    """Train in FP32, then in BF16, with an optimizer each."""
    model = mlp()
    with Inspector(model) as inspector:
        for dtype in (torch.float32, torch.bfloat16):
            optimizer = optimizer_of(model.to(dtype))
            for _ in range(6):
                take_step(optimizer, model(torch.randn(16, 8).to(dtype)).float().square().mean())
    return inspector.report()


def test_a_second_phase_with_an_optimizer_of_its_own_is_not_a_finding():
    assert named(in_two_phases(sgd), "model-converted") == []


def test_a_cast_between_two_optimizers_is_told_where_the_narrow_states_are():
    """As an evaluation in 16 bits between two stages leaves the model."""
    report = in_two_phases(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    (finding,) = named(report, "moments-cannot-decay")
    assert "Until step 5 an optimizer stepped 4 of the weights in FP32: code before step 6 converted" in finding.message


class MasterSGD(torch.optim.Optimizer):
    """Keeps FP32 masters among its states."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["master"] = torch.zeros(()), weight.float()
                state["step"] += 1
                state["master"] -= group["lr"] * weight.grad.to(state["master"].dtype)
                weight.copy_(state["master"])


def saved_states(model) -> dict:
    optimizer = MasterSGD(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def load_and_train(dtype=torch.bfloat16, after_loading=lambda optimizer, saved: None):
    model = mlp(dtype)
    saved, optimizer = saved_states(model), MasterSGD(model.parameters())
    with Inspector(model) as inspector:
        for step in range(12):
            if step == 5:
                optimizer.load_state_dict(saved)
                after_loading(optimizer, saved)
            take_step(optimizer, model(torch.randn(16, 8).to(dtype)).float().square().mean())
    return inspector.report()


def test_masters_among_the_states_that_a_load_casts_are_named():
    report = load_and_train()
    (finding,) = named(report, "states-cast-by-loading")
    assert (finding.severity, finding.step) == ("warning", 5)
    assert "(test_dtype_changes.py:" in finding.message
    assert "cast the states 'master' of MasterSGD from FP32 to BF16" in finding.message
    assert named(report, "updates-lost")[0].severity == "info"


def test_the_code_of_the_fix_restores_the_states():
    (finding,) = named(load_and_train(), "states-cast-by-loading")
    report = load_and_train(
        after_loading=lambda optimizer, saved: exec(finding.code, {"optimizer": optimizer, "saved": saved})
    )
    assert named(report, "states-cast-by-loading") == named(report, "updates-lost") == []


def test_states_of_fp32_weights_are_loaded_without_a_finding():
    assert named(load_and_train(torch.float32), "states-cast-by-loading") == []


def test_states_that_were_saved_in_bf16_are_loaded_without_a_finding():
    model = mlp(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8).bfloat16()).sum().backward()
    optimizer.step()
    with Inspector(model) as inspector:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model(torch.randn(4, 8).bfloat16()).sum().backward()
        optimizer.step()
    assert named(inspector.report(), "states-cast-by-loading") == []


def test_loading_is_unchanged_with_and_after_an_inspector():
    # An earlier test's inspector may await the garbage collector.
    gc.collect()
    model = mlp(torch.bfloat16)
    original, saved = torch.optim.Optimizer.load_state_dict, saved_states(model)
    optimizer = MasterSGD(model.parameters())
    with Inspector(model):
        assert torch.optim.Optimizer.load_state_dict is not original
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        saved["state"]["of no parameter"] = 3
        optimizer.load_state_dict(saved)
    assert torch.optim.Optimizer.load_state_dict is original
    assert optimizer.state["of no parameter"] == 3
