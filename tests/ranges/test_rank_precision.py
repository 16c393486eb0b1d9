"""rank_precision: the errors of gradients against FP32's, and the part of a model that makes them."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import mpinspect


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def in_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, x)


class Shift(nn.Module):
    """Adds a large number and subtracts it: in BF16 little of the values is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 100) - 100


def _batch() -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def _net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *between, nn.Tanh(), nn.Linear(32, 8))


def test_the_errors_are_those_against_a_model_in_fp32() -> None:
    model, x = _net().bfloat16(), _batch().bfloat16()
    report = mpinspect.rank_precision(model, mean_square, x)
    exact = copy.deepcopy(model).float()
    mean_square(model, x).backward()
    mean_square(exact, x.float()).backward()
    errors = {
        name: float((each.grad.float() - wide.grad).norm() / wide.grad.norm())  # type: ignore[union-attr]
        for (name, each), wide in zip(model.named_parameters(), exact.parameters(), strict=True)
    }
    assert report.weights == len(errors)
    assert report.errors.whose == max(errors, key=lambda name: errors[name])
    assert report.errors.worst == pytest.approx(max(errors.values()), rel=1e-4)
    assert report.errors.mean == pytest.approx(sum(errors.values()) / len(errors), rel=1e-4)


@pytest.mark.parametrize(
    ("loss_fn", "dtype"),
    [(in_autocast, torch.float32), (mean_square, torch.bfloat16)],
    ids=["autocast", "BF16 weights"],
)
def test_the_module_that_loses_the_values_is_ranked_first(loss_fn, dtype) -> None:
    report = mpinspect.rank_precision(_net(Shift()).to(dtype), loss_fn, _batch().to(dtype))
    module = next(each for each in report.modules if not each.operator)
    assert module.module == "1"
    assert module.errors.mean < report.errors.mean / 5
    # Either operator alone still rounds the sum.
    operators = {each.operator for each in report.modules if each.module == "1"}
    assert {"add", "sub"} <= operators
    text = str(report)
    assert "In FP32, 1 alone takes" in text
    assert "Its operators do so only together." in text
    assert "x = module.float()(x.float())" in text


def test_a_part_of_a_block_is_found_below_its_block() -> None:
    model = nn.Sequential(_net(), nn.Linear(8, 16), _net(Shift()))
    report = mpinspect.rank_precision(model, in_autocast, _batch())
    assert [each.module for each in report.modules if not each.operator and not each.is_own][:2] == ["2", "2.1"]


def test_code_outside_of_modules_is_a_candidate() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x) + 100 - 100).float().square().mean()

    report = mpinspect.rank_precision(_net(), loss, _batch())
    assert (report.modules[0].module, report.modules[0].is_own) == ("", True)
    assert "In FP32, Sequential's own code and the loss alone takes" in str(report)


def test_a_model_in_fp32_has_no_errors() -> None:
    report = mpinspect.rank_precision(_net(nn.Dropout(0.5)), mean_square, _batch())
    assert report.errors.mean == 0
    assert report.modules == ()
    assert "computes nothing in FP16 or BF16" in " ".join(str(report).split())


def test_gradients_that_are_not_finite_are_not_ranked() -> None:
    report = mpinspect.rank_precision(_net().half(), lambda model, x: (model(x) * 1e4).square().mean(), _batch().half())
    assert report.errors is None
    assert "second_opinion names the operator that breaks" in " ".join(str(report).split())


def test_dropout_draws_the_same_numbers_in_every_pass() -> None:
    model = _net(nn.BatchNorm1d(32), nn.Dropout(0.5)).train()
    report = mpinspect.rank_precision(model, in_autocast, _batch())
    # The gradient of the bias before the BatchNorm is zero in theory.
    assert report.weights == len([*model.parameters()]) - 1
    assert report.errors.worst < 0.1


def test_candidates_without_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.ranges.rank_precision._MOST_PASSES", 4)
    report = mpinspect.rank_precision(_net(), in_autocast, _batch())
    assert len(report.modules) == 2
    assert report.left_out > 0
    assert "candidates were left out for want of time." in str(report)


def test_forms(tmp_path) -> None:
    report = mpinspect.rank_precision(_net(Shift()), in_autocast, _batch())
    plain = json.loads(report.to_json())
    assert plain["schema"] == "mpinspect.ranking"
    assert plain["modules"][0]["errors"]["mean"] == report.modules[0].errors.mean
    assert math.isfinite(plain["errors"]["worst"])
    for suffix in ("html", "md", "txt"):
        assert "own code and the loss" in report.save(tmp_path / f"ranking.{suffix}").read_text("utf-8")


@pytest.mark.parametrize(
    ("model", "loss_fn", "error", "words"),
    [
        (lambda x: x, mean_square, TypeError, "not a torch.nn.Module"),
        (nn.Linear(16, 8), 3, TypeError, "loss_fn is of type int"),
        (nn.Linear(16, 8), lambda model, x: model(x), ValueError, "reduce it to one number"),
    ],
)
def test_bad_input_is_named(model, loss_fn, error, words) -> None:
    with pytest.raises(error, match=words):
        mpinspect.rank_precision(model, loss_fn, _batch())
