"""The recipes that an inspector or ``mpinspect run`` is asked for: measured in a few sampled steps, stored and reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from models import Of
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import take_step

import mpinspect
from mpinspect import Inspector
from mpinspect.numeric.recipes import RECIPES, TrainingRecipe
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.analysis.recipe_comparison import recipe_report
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.session import OperandRecord, Precision, Session


class Unusual(nn.Linear):
    """A subclass, which converters take too."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(64, 64), nn.Linear(64, 32), Unusual(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(model: nn.Module, steps: int, recipes="mxfp4", loss=loss_of, calls: int = 1, **options) -> Inspector:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model, optimizers=optimizer, recipes=recipes, **options) as inspector:
        for step in range(steps):
            for _ in range(calls):
                loss(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return inspector


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("options", [{}, {"watch": False}, {"capture": KINDS}])
def test_a_step_measures_the_same_as_compare_recipes(options):
    names = ["mxfp4", "fp8-tensorwise"]
    expected = mpinspect.compare_recipes(net(), loss_of, [batch(0)], names)
    found = recipe_report(train(net(), 1, names, **options).session())
    assert (found.rows, found.recipes, found.batches) == (expected.rows, expected.recipes, 1)
    assert found.not_called == expected.not_called == ("unused",)
    assert found.tokens == expected.tokens == {"body": 48, "head": 48}
    assert found.advised is RECIPES["fp8-tensorwise"]


def test_the_first_second_fourth_and_eighth_sampled_steps_are_added():
    records = train(net(), 11, every=1).session().precision.operands
    assert {record.steps for record in records} == {4}
    assert (
        sum(record.loss.nonzero for record in records if record.key == ("head", "mxfp4", "fprop", "input"))
        == 4 * 48 * 64
    )
    assert not train(net(), 3, ()).session().precision.operands


def test_a_step_measures_one_call_of_each_layer():
    (once, twice) = (train(net(), 1, calls=calls).session().precision.operands for calls in (1, 2))
    assert once == twice


def test_a_layer_that_is_recomputed_is_measured_once():
    def loss(reentrant: bool):
        return lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()

    plain = train(net(), 1, loss=lambda model, x: loss_of(model, x.requires_grad_())).session().precision.operands
    for reentrant in (False, True):
        assert train(net(), 1, loss=loss(reentrant)).session().precision.operands == plain


def test_training_is_the_same_to_the_bit():
    bare, inspected = net(), net()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    for step in range(3):
        take_step(optimizer, loss_of(bare, batch(step)))
    train(inspected, 3, list(RECIPES))
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), inspected.parameters(), strict=True))


def test_a_session_file_holds_the_sums_and_ranks_are_added(tmp_path):
    session = train(net(), 2, log_dir=tmp_path / "log").session()
    loaded = Session.load(tmp_path / "log")
    assert loaded.precision.operands == session.precision.operands
    assert len(session.precision.operands) == 2 * 6 - 2  # the first layer has no dgrad
    info = replace(session.info, world_size=2)
    ranks = [replace(session, info=replace(info, rank=rank)) for rank in range(2)]
    merged = merge_ranks(ranks)
    for both, one in zip(merged.precision.operands, session.precision.operands, strict=True):
        assert both.loss == one.loss + one.loss
        assert (both.tokens, one.tokens) == (48, 48)
    assert "mxfp4" in analyse(merged).to_json()


def test_the_report_has_a_section_only_where_recipes_were_asked_for():
    text = str(train(net(), 2, ["mxfp8", "nvfp4"]).report())
    assert "Recipes of FP8 and FP4" in text
    assert "Measured in 2 steps, on one call of each of 1 layer and 'head'" in text
    assert "KEEP = {'head', 'unused'}" in text
    assert "Recipes of FP8" not in str(train(net(), 2, ()).report())


def test_a_recipe_of_a_later_version_is_left_out():
    record = OperandRecord("fc", "fp3", "fprop", "input", (32, 32))
    assert recipe_report(Session(precision=Precision(operands=(record,)))) is None


def test_a_run_judges_a_product_of_a_module_that_is_not_a_linear():
    def judged():
        model = net()
        model.body = Of(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(64, 64)))
        return model

    torch.manual_seed(0)
    model = judged()
    expected = mpinspect.compare_recipes(model, loss_of, [batch(0)], ["mxfp8"])
    found = recipe_report(train(model, 1, "mxfp8").session())
    assert (found.rows, found.not_linear) == (expected.rows, expected.not_linear) == (expected.rows, ("body",))
    # No converter takes the product, and a head stays wide.
    assert (found.converted(RECIPES["mxfp8"]), found.kept_wide(RECIPES["mxfp8"])) == (0, ("head",))


def test_bad_recipes_are_named():
    with pytest.raises(ValueError, match="'fp7' names no recipe: there are fp8-tensorwise"):
        Inspector(net(), recipes=["fp7"])
    own = TrainingRecipe("own", "Own", RECIPES["mxfp8"].products, 32)
    with pytest.raises(ValueError, match=r"capture=\(\) samples none"):
        Inspector(net(), recipes="mxfp8", capture=())
    with pytest.raises(TypeError, match="compare_recipes takes recipes of your own"):
        Inspector(net(), recipes=[own])  # type: ignore[list-item]


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(48, 64)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_that_is_run_with_recipes_has_their_table(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "mpinspect", "run", "--recipes", "mxfp8,MXFP4", "--log-dir", "log", "train.py"]
    status, out, err = warm.run(tmp_path, words)
    assert status == 0, out + err
    report = (tmp_path / "log" / "report.md").read_text("utf-8")
    assert "Recipes of FP8 and FP4" in report
    assert "MXFP4" in report
    found = json.loads((tmp_path / "log" / "report.json").read_text("utf-8"))
    operands = found["models"][0]["ranges"]["session"]["precision"]["operands"]
    assert {operand["recipe"] for operand in operands} == {"mxfp8", "mxfp4"}
    status, out, err = warm.run(tmp_path, ["-m", "mpinspect", "run", "--recipes", "fp7", "train.py"])
    assert status == 2
    assert "'fp7' names no recipe" in err
