"""The FP8 precisions: the layers that torchao converts, the models that are refused, and training in all three."""

import copy
import importlib

import pytest
import torch
import torchao_here
from agreeing_reports import analyse
from equality import equal
from quantising import quantised
from torch import nn
from trainings import mixed_step

import mpinspect
from mpinspect import Inspector, MixedPrecision
from mpinspect.numeric.recipes import RECIPES
from mpinspect.training import PRECISIONS, narrow

NARROW = sorted(name for name, each in PRECISIONS.items() if each.recipe)


class Net(nn.Module):
    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 32, generator=generator), torch.randint(10, (rows,), generator=generator)


def made(precision: str, keep_wide=("head",), model: nn.Module | None = None, **options) -> MixedPrecision:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return MixedPrecision(model, optimizer, precision, keep_wide=keep_wide, **options)


def train(mp: MixedPrecision, steps: int) -> list[float]:
    x, y = batch()
    return [mixed_step(mp, lambda: nn.functional.cross_entropy(mp.model(x), y)).item() for _ in range(steps)]


@pytest.fixture
def stubbed(tmp_path):
    narrow._mxfp8_class.cache_clear()
    with torchao_here.stubbed(tmp_path):
        yield
    narrow._mxfp8_class.cache_clear()


# -- with torchao ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", NARROW)
def test_fifty_steps_lower_the_loss_and_the_report_names_the_recipe(precision):
    torchao_here.torchao()
    mp = made(precision)
    with Inspector(mp.model, optimizers=mp.optimizers) as inspector:
        losses = train(mp, 50)
    assert losses[-1] < losses[0] / 2
    assert (mp.steps, mp.skipped_steps, mp.loss_scale) == (50, 0, 1.0)
    found = analyse(inspector.session())
    title = RECIPES[precision].title
    assert found.verdict.precision.startswith(f"3 of 4 Linear in {title} (emulated), 1 in BF16")
    layers = inspector.session().precision.layers
    assert {module: record.products for record in layers for module in record.modules} == {
        **dict.fromkeys(("blocks.0", "blocks.1", "blocks.2"), RECIPES[precision].products),
        "head": RECIPES["fp8-tensorwise"].products.__class__(),
    }
    assert not {"bias-left-out", "narrow-head", "nothing-converted"} & {finding.id for finding in found.findings}


@pytest.mark.parametrize("precision", NARROW)
def test_a_layer_computes_the_product_of_quantised_operands(precision):
    torchao_here.torchao()

    mp = made(precision)
    layer, (x, _) = mp.model.blocks[0], batch()
    with torch.no_grad(), mp.autocast():
        found = layer(x)
    recipe = RECIPES[precision]
    # MXFP8's weight is in BF16 before it is quantised, as its kernels take it.
    weight = layer.weight.detach().bfloat16() if precision == "mxfp8" else layer.weight.detach()
    left, right = (
        quantised(tensor, recipe.quantization("fprop", name)).double()
        for name, tensor in (("input", x.bfloat16()), ("weight", weight))
    )
    expected = left @ right.T
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), (expected.float().bfloat16() + layer.bias.bfloat16()).double(), atol=2.0**-6)
    exact = nn.functional.linear(x, layer.weight).double()
    assert (expected - exact).abs().max() > 2.0**-6


@pytest.mark.parametrize("precision", NARROW)
def test_a_checkpoint_continues_to_the_bit_and_loads_into_other_precisions(precision, tmp_path):
    torchao_here.torchao()
    mp = made(precision)
    train(mp, 3)
    mp.save(tmp_path / "checkpoint.pt")
    expected = train(mp, 3)
    again = made(precision)
    again.load(tmp_path / "checkpoint.pt")
    assert train(again, 3) == expected
    assert "were taken over exactly" in made("bf16-amp", ()).load(tmp_path / "checkpoint.pt")
    assert equal(made(precision).weights(), made("fp32", ()).weights())


def test_a_model_converted_by_hand_is_refused():
    model = torchao_here.to_float8(Net(), names=["blocks.1"])
    with pytest.raises(ValueError, match=r"'blocks\.1' is converted by torchao already"):
        made("fp8-rowwise", model=model)
    with pytest.raises(ValueError, match=r"'blocks\.2' is converted by torchao already"):
        made("mxfp8", model=torchao_here.to_mxfp8(Net(), ["blocks.2"]))


# -- with a stub -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "fp8-rowwise"])
@pytest.mark.usefixtures("stubbed")
def test_the_chosen_layers_become_float8_linear_with_the_same_parameters(precision):
    model = Net()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    mp = made(precision, model=model)
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    assert kinds["head"] == "Linear"
    assert {kinds[f"blocks.{block}"] for block in range(3)} == {"Float8Linear"}
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert (model.blocks[0].config.recipe, model.blocks[0].config.emulate) == (precision.removeprefix("fp8-"), True)
    seen = []
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    losses = train(mp, 20)
    assert losses[-1] < losses[0]
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert mp.emulated


@pytest.mark.usefixtures("stubbed")
def test_the_chosen_layers_become_mxfp8_linear_with_their_bias_and_hooks():
    model = Net()
    seen = []
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    mp = made("mxfp8", ["head", "blocks.2"], model)
    x, _ = batch()
    with mp.autocast():
        model(x)
    calls = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear").calls
    assert [call[:2] for call in calls] == [(torch.bfloat16, torch.bfloat16)] * 2
    options = calls[0][2]
    assert (options["kernel_preference"].value, options["scale_calculation_mode"].value) == ("emulated", "rceil")
    assert not options["wgrad_with_hp"]
    with torch.no_grad():
        model.blocks[1].bias.add_(8.0)
    with mp.autocast():
        model(x)
    assert (seen[1] - seen[0]).float().mean().item() == pytest.approx(8.0, abs=0.1)
    train(mp, 5)
    with Inspector(model, optimizers=mp.optimizers) as inspector:
        train(mp, 2)
    first, *others = inspector.session().precision.layers
    assert (first.modules, first.products, first.emulated) == (
        ("blocks.0", "blocks.1"),
        RECIPES["mxfp8"].products,
        True,
    )
    assert [record.modules for record in others] == [("blocks.2",), ("head",)]
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("precision", ["fp8-rowwise", "mxfp8"])
@pytest.mark.usefixtures("stubbed")
def test_a_layer_with_two_paths_is_converted_in_both_or_in_none(precision):
    def shared() -> Net:
        model = Net()
        model.blocks.append(model.blocks[0])
        return model

    model = shared()
    mp = made(precision, model=model)
    kinds = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    assert kinds["blocks.0"] == kinds["blocks.3"] == ("MXFP8Linear" if precision == "mxfp8" else "Float8Linear")
    assert model.blocks[0].weight is model.blocks[3].weight
    assert all(len(block._forward_pre_hooks) == 1 for block in model.blocks)
    losses = train(mp, 20)
    assert losses[-1] < losses[0]
    model = shared()
    made(precision, ["head", "blocks.3"], model)
    assert type(model.blocks[0]) is type(model.blocks[3]) is nn.Linear


@pytest.mark.usefixtures("stubbed")
def test_rows_that_kernels_refuse_are_named_where_a_weight_gradient_is_needed():
    mp = made("mxfp8")
    x, _ = batch(33)
    with mp.autocast(), pytest.raises(ValueError, match=r"'blocks\.0' was called with 33 rows .* multiples of 32"):
        mp.model(x)
    with torch.no_grad(), mp.autocast():
        assert mp.model(x).shape == (33, 10)


@pytest.mark.usefixtures("stubbed")
def test_a_layer_that_is_converted_already_is_refused():
    mp = made("fp8-rowwise")
    with pytest.raises(ValueError, match=r"'blocks\.0' is converted by torchao already"):
        made("fp8-rowwise", model=mp.model)


def test_warnings_of_torchao_become_one(tmp_path):
    code = "import warnings; warnings.warn('one'); warnings.warn('two')"
    words = r"torchao 0\.18\.0 warned when it was imported \(and 1 more\): one"
    with torchao_here.stubbed(tmp_path, code=code), pytest.warns(UserWarning, match=words) as caught:
        made("fp8-rowwise")
    assert len(caught) == 1


# -- refused -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [
        ("0.17.0", "", r"needs torchao 0\.18 or newer, and 0\.17\.0 is installed: .*mpinspect\[fp8\]"),
        ("0.19.0", "raise RuntimeError('no torch')", r"torchao 0\.19\.0 can't be imported with torch .*: no torch"),
    ],
)
def test_a_torchao_that_is_older_or_broken_is_named(tmp_path, version, code, words):
    model = Net()
    with torchao_here.stubbed(tmp_path, version, code), pytest.raises(ImportError, match=words):
        made("fp8-rowwise", model=model)
    assert type(model.blocks[0]) is nn.Linear


def test_a_missing_torchao_is_named_with_its_extra(monkeypatch):
    def version(name: str) -> str:
        raise narrow.PackageNotFoundError(name)

    monkeypatch.setattr(narrow, "version", version)
    with pytest.raises(ImportError, match=r"precision='mxfp8' needs torchao: pip install mpinspect\[fp8\]"):
        made("mxfp8")


def test_models_that_torchao_does_not_convert_are_named():
    with pytest.raises(
        ValueError, match=r"multiples of 16, unlike 'head' \(32 -> 10 in the first\).*keep_wide=\('head',\)"
    ):
        made("fp8-rowwise", ())
    with pytest.raises(ValueError, match=r"multiples of 32, unlike 'blocks\.0', 'blocks\.1', 'blocks\.2' \(48 -> 48"):
        made("mxfp8", model=Net(48))
    with pytest.raises(ValueError, match="has none to convert"):
        made("mxfp8", (), nn.Sequential(nn.Conv2d(1, 32, 3)))
    with pytest.raises(ValueError, match="has none to convert"):
        made("mxfp8", "*")
    with pytest.raises(ValueError, match=r"wrap it in nn\.Sequential"):
        made("mxfp8", (), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"'output' matches none of the model's Linear layers: 'blocks\.0'"):
        made("mxfp8", ["output"])
    with pytest.raises(ValueError, match="converts no layers to FP8"):
        made("bf16-amp", ["head"])


def test_the_precisions_and_recipes_have_the_same_names():
    assert set(NARROW) == {"fp8-tensorwise", "fp8-rowwise", "mxfp8"} <= set(RECIPES)
    assert mpinspect.MixedPrecision is MixedPrecision
