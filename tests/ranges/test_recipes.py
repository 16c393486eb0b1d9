"""compare_recipes: what FP8 and FP4 recipes lose of a model's products."""

import ast
import copy
import functools
import json
import math
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from operator import add
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torchao_here
from hypothesis import given
from hypothesis import strategies as st
from models import Of
from quantising import quantised
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trainings import inspected, take_step

import mpinspect
from mpinspect.counting.blocks import quantization_loss
from mpinspect.numeric.recipes import MXFP4, MXFP8_E4M3, RECIPES, Products, TrainingRecipe, least_even, uniform
from mpinspect.ranges.analysis import recipe_comparison
from mpinspect.ranges.analysis.recipe_comparison import ProductRow, RecipeReport, recipe_report
from mpinspect.ranges.capture.layers import Selection, find_layers
from mpinspect.ranges.capture.operands import OperandLosses
from mpinspect.ranges.faults.measure.converted import converted_layers
from mpinspect.ranges.report.recipes import NORMAL, document
from mpinspect.reporting.document import Code, Items, Section
from mpinspect.reporting.text import render


class _Net(nn.Module):
    """Two blocks and a head, with sizes that are multiples of 32."""

    def __init__(self, width: int = 64, classes: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _batch() -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(1))


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _row(report: RecipeReport, module: str, product: str) -> ProductRow:
    return next(row for row in report.rows if (row.module, row.product) == (module, product))


def test_each_operand_is_compared_with_its_quantised_self() -> None:
    model, x = _net(), _batch()
    caught: dict[str, torch.Tensor] = {}
    model.head.register_forward_hook(lambda module, args, output: caught.update(x=args[0].detach(), y=output))
    loss = _loss(model, x)
    (gradient,) = torch.autograd.grad(loss, caught["y"])
    report = mpinspect.compare_recipes(model, _loss, [x], ["mxfp4"])
    weight = model.head.weight.detach()
    operands = {"fprop": (caught["x"], weight), "dgrad": (gradient, weight.T), "wgrad": (gradient.T, caught["x"].T)}
    for product, expected in operands.items():
        (cell,) = _row(report, "head", product).cells
        for found, tensor in zip(cell.operands, expected, strict=True):
            q = quantised(tensor.contiguous(), MXFP4).double()
            exact = tensor.double()
            assert found.loss.flushed == int(((q == 0) & (exact != 0)).sum())
            assert found.loss.nonzero == int((exact != 0).sum())
            assert found.loss.gain == pytest.approx(float((q * exact).sum() / exact.square().sum()) - 1, abs=1e-9)
            error = float((q - exact).square().sum() / exact.square().sum())
            assert found.loss.noise_to_signal == pytest.approx(error, rel=1e-9)


def test_batches_and_calls_add_up() -> None:
    model, x = _net(), _batch()
    one = mpinspect.compare_recipes(model, _loss, [x], ["mxfp8"])
    two = mpinspect.compare_recipes(model, _loss, [x, x], ["mxfp8"])
    for first, second in zip(one.rows, two.rows, strict=True):
        for a, b in zip(first.cells[0].operands, second.cells[0].operands, strict=True):
            assert b.loss == a.loss + a.loss
    assert (one.batches, two.batches) == (1, 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_row_for_each_product_that_it_quantises(recipe: str) -> None:
    report = mpinspect.compare_recipes(_net(), _loss, [_batch()], [recipe])
    wide = RECIPES[recipe].products.wide
    found = {(row.module, row.product) for row in report.rows}
    products = [product for product in ("fprop", "dgrad", "wgrad") if product not in wide]
    # The batch needs no gradient, so autograd computes no dgrad of the first layer.
    first = {("blocks.0.0", product) for product in products if product != "dgrad"}
    assert found == first | {(module, product) for module in ("blocks.1.0", "head") for product in products}


def test_products_that_autograd_does_not_compute_are_not_judged() -> None:
    model = _net()
    model.blocks[1][0].weight.requires_grad_(False)
    model.head.requires_grad_(False)
    rows = mpinspect.compare_recipes(model, _loss, [_batch().requires_grad_()], ["mxfp8"]).rows
    found = {(row.module, row.product) for row in rows}
    assert {product for module, product in found if module == "blocks.0.0"} == {"fprop", "dgrad", "wgrad"}
    assert {product for module, product in found if module != "blocks.0.0"} == {"fprop", "dgrad"}


def test_a_layer_with_two_kinds_of_calls_has_the_gradients_of_the_calls_that_need_them() -> None:
    model, x = _net(), _batch()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return sum(model.head(each).square().mean() for each in (batch, batch.clone().requires_grad_()))  # type: ignore[return-value]

    report = mpinspect.compare_recipes(model, loss, [x], ["mxfp8"])
    weights = {row.product: row.cells[0].operands[1].loss.nonzero for row in report.rows}
    assert weights["fprop"] == 2 * weights["dgrad"]


def test_tokens_of_very_different_weight_are_lost_by_one_scale_for_the_tensor_and_not_by_one_for_each_block() -> None:
    model = _net()
    weights = 2.0 ** torch.linspace(-24, 0, 48)[:, None]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch).square() * weights).mean()

    report = mpinspect.compare_recipes(model, loss, [_batch()], ["fp8-tensorwise", "fp8-rowwise", "mxfp8"])
    tensorwise, rowwise, mxfp8 = _row(report, "head", "dgrad").cells
    assert tensorwise.operands[0].loss.flushed > 0
    assert rowwise.operands[0].loss.flushed == mxfp8.operands[0].loss.flushed == 0
    # wgrad sums over tokens, so that its blocks hold tokens of different weight.
    assert _row(report, "head", "wgrad").cells[2].operands[0].loss.flushed > 0


def test_a_module_that_loses_more_than_one_percent_is_kept_wide() -> None:
    model = _net()
    with torch.no_grad():
        # In every block of 32 one weight is so large that FP4 flushes the others.
        model.head.weight[:, ::32] = 40.0
    report = mpinspect.compare_recipes(model, _loss, [_batch()], ["mxfp8", "mxfp4"])
    mxfp8, mxfp4 = report.recipes
    assert report.unserved(mxfp8) == ()
    assert "head" in report.unserved(mxfp4)
    assert report.advised == mxfp8
    assert "head" in report.kept_wide(mxfp4)
    text = " ".join(str(report).split())
    assert "MXFP8, cc 10.0 passes by range: at worst " in text
    # The verdict is on the layers that would be converted. The head is named apart.
    row, operand = report.worst(mxfp4) or pytest.fail("nothing is lost")
    _, of_head = report.worst(mxfp4, ["head"]) or pytest.fail("nothing is lost")
    share, at_head = operand.loss.lost_l1_share, of_head.loss.lost_l1_share
    for found, of_heads in ((share, False), (at_head, True)):
        rows = [each for each in report.rows if (each.module == "head") == of_heads]
        assert found == max(each.loss.lost_l1_share for row in rows for each in row.cells[1].operands)
    assert row.module.startswith("blocks")
    assert at_head > share
    assert "Recipes for _Net, 2 layers and 'head', 1 batch" in text
    fails = f"fails in {len({*report.unserved(mxfp4)} - {'head'})} of 2 layers"
    place = f"'{row.module}' ({row.product}, {operand.tensor})"
    normal = f"; normally distributed values lose {NORMAL['mxfp4']}."
    assert f"MXFP4, cc 10.0 {fails}: at worst {100 * share:.2g}% Worst: {place}{normal}" in text
    assert f"'head' (at worst {100 * at_head:.2g}%, in MXFP4)." in text


def test_sizes_that_kernels_refuse_are_kept_wide() -> None:
    model = nn.Sequential(OrderedDict(body=_Net(classes=10), between=nn.Linear(10, 32), head=nn.Linear(32, 10)))
    report = mpinspect.compare_recipes(model, _loss, [_batch()], ["fp8-rowwise"])
    (recipe,) = report.recipes
    assert report.unsuited(recipe) == report.kept_wide(recipe) == ("body.head", "between", "head")
    text = " ".join(str(report).split())
    # Heads stay wide whatever their sizes.
    assert "Its kernels refuse 'between' (10 is not a multiple of 16)." in text
    assert "KEEP = {'body.head', 'between', 'head'}" in text


def test_operands_have_the_dtype_of_autocast() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch)
        return y.float().square().mean()

    model, x = _net(), _batch()
    report = mpinspect.compare_recipes(model, loss, [x], ["mxfp8"])
    found = _row(report, "blocks.0.0", "fprop").cells[0].operands[0].loss
    assert found.magnitudes == pytest.approx(float(x.bfloat16().double().abs().sum()), rel=1e-12)


def test_blocks_that_become_nan_are_named() -> None:
    model, x = _net(), _batch()
    x[3, 5] = math.inf
    report = mpinspect.compare_recipes(model, _loss, [x], ["mxfp8"])
    assert "blocks.0.0" in report.broken
    assert "hold infinities or NaN" in str(report)


def test_layers_that_are_not_called_are_named() -> None:
    layers = {"attention": nn.MultiheadAttention(64, 2, batch_first=True), "out": nn.Linear(64, 32)}
    model = Of(lambda self, x: self.out(self.attention(x, x, x)[0]), **layers)
    report = mpinspect.compare_recipes(model, _loss, [torch.randn(2, 32, 64)], ["mxfp8"])
    assert report.not_called == ("attention.out_proj",)
    assert "'attention.out_proj'" in str(report)


def test_a_cell_has_the_noise_of_the_worst_layer_under_stochastic_rounding() -> None:
    report = mpinspect.compare_recipes(_net(), _loss, [_batch()], ["nvfp4"])
    operands = [each for block in (0, 1) for each in _row(report, f"blocks.{block}.0", "wgrad").cells[0].operands]
    deviation = max(math.sqrt(each.loss.noise_to_signal) for each in operands if each.is_stochastic)
    line = next(line for line in str(report).splitlines() if line.strip().startswith("wgrad"))
    assert f"noise {100 * deviation:.2g}%" in line
    assert 0.05 < deviation < 0.3


def _transposed(linear: nn.Linear) -> nn.Module:
    """Store the weight as (input features, output features), like the Conv1D of transformers."""
    weight = nn.Parameter(linear.weight.detach().T.clone())
    return Of(lambda self, x: torch.addmm(self.bias, x, self.weight), weight=weight, bias=linear.bias)


class _Subclass(nn.Linear):
    pass


def _scaled() -> nn.Module:
    """Return a module that has a matrix as its weight, and does not multiply by it."""
    return Of(lambda self, x: x * self.weight.diagonal(), weight=nn.Parameter(torch.rand(64, 64)))


def test_a_product_is_judged_whatever_the_class_of_its_module_and_the_layout_of_its_weight() -> None:
    plain, other, x = _net(), _net(), _batch()
    with torch.no_grad():
        for net in (plain, other):
            net.head.weight[:, ::32] = 40.0
    other.blocks[1][0], other.head = _transposed(other.blocks[1][0]), _transposed(other.head)  # type: ignore[assignment]
    other.blocks[0][0].__class__ = _Subclass
    other.blocks.append(_scaled())
    plain.blocks.append(_scaled())
    plain.blocks[2].load_state_dict(other.blocks[2].state_dict())
    expected, found = (mpinspect.compare_recipes(net, _loss, [x], ["mxfp8", "mxfp4"]) for net in (plain, other))
    assert found.rows == expected.rows
    assert (expected.not_linear, found.not_linear) == ((), ("blocks.1.0", "head"))
    mxfp8, mxfp4 = found.recipes
    # Only the subclass of nn.Linear is converted, and no filter has to leave out the others.
    assert (found.converted(mxfp8), expected.converted(mxfp8)) == (1, 2)
    assert (found.kept_wide(mxfp8), expected.kept_wide(mxfp8)) == ((), ("head",))
    assert "head" in found.unserved(mxfp4)
    assert found.kept_wide(mxfp4) == found.filter_fqns(mxfp4) == ("blocks.0.0",)
    text = " ".join(str(found).split())
    assert "Recipes for _Net, 3 layers, 1 batch" in text
    assert "MXFP8 covers 1 of 3 layers" in text
    assert "Converters take torch.nn.Linear alone, and leave 'blocks.1.0', 'head'. To convert one, replace it" in text


def test_a_gpt2_is_judged_product_by_product() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    report = mpinspect.compare_recipes(model, lambda m, x: m(input_ids=x, labels=x).loss, [tokens], ["mxfp8"])
    block = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert report.modules == dict(
        zip([*block, "lm_head"], [(32, 96), (32, 32), (32, 128), (128, 32), (32, 64)], strict=True)
    )
    assert report.not_linear == tuple(block)
    text, code = render(document(report), width=120), recipe_comparison.CONV1D_CODE
    assert "leave them in BF16: 'lm_head'" in text
    assert report.advised is None
    assert report.conv1d == report.not_linear
    assert all(line in text for line in code)
    assert "good" not in _tones(report)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    model.double().eval()
    expected, trained = model(tokens).logits, sum(each.requires_grad for each in model.parameters())
    exec("\n".join(code), {"model": model})
    torch.testing.assert_close(model(tokens).logits, expected)
    assert sum(each.requires_grad for each in model.parameters()) == trained
    report = mpinspect.compare_recipes(model, lambda m, x: m(input_ids=x, labels=x).loss, [tokens], ["mxfp8"])
    assert (report.not_linear, report.converted(report.recipes[0])) == ((), 4)
    assert _tones(report) == {"good"}


def _tones(report: RecipeReport) -> set[str]:
    """Return the tones of the verdicts on the recipes."""
    return {item.tone for block in document(report).blocks if isinstance(block, Items) for item in block.items}


class _Experts(nn.Module):
    """Three experts, each with a share of the rows, in one parameter or in a Linear each."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        torch.manual_seed(0)
        self.before = nn.Linear(64, 64)
        self.ends = [32, 64, 96] if form == "bmm" else [0, 40, 96]
        weights = torch.randn(3, 32, 64) * 2.0 ** torch.randint(-8, 1, (3, 32, 64))
        if form == "linears":
            self.each = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in weights)
            for layer, weight in zip(self.each, weights, strict=True):
                layer.weight.data.copy_(weight)
        else:
            self.weights = nn.Parameter(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.form == "bmm":
            return torch.bmm(x.view(3, 32, 64), self.weights.mT)
        if self.form == "grouped":
            return torch._grouped_mm(x, self.weights.transpose(-2, -1), offs=torch.tensor(self.ends, dtype=torch.int32))
        parts = [each for each in zip([0, *self.ends], self.ends, range(3), strict=False) if each[0] < each[1]]
        if self.form == "linears":
            return torch.cat([self.each[place](x[begin:end]) for begin, end, place in parts])
        return torch.cat([nn.functional.linear(x[begin:end], self.weights[place]) for begin, end, place in parts])


@pytest.mark.parametrize("form", ["loop", "bmm", "grouped"])
def test_experts_in_one_parameter_are_judged_as_a_linear_for_each_expert_would_be(form: str) -> None:
    model, apart = _Experts(form), _Experts("linears")
    apart.ends = model.ends
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    recipes = ["fp8-rowwise", "mxfp8", "mxfp4", "fp8-block"]
    found, expected = (mpinspect.compare_recipes(each, _loss, [x], recipes) for each in (model, apart))
    assert (found.not_linear, found.experts) == (("weights",), ("weights",))
    assert found.functions == {"weights": {"loop": "linear", "grouped": "_grouped_mm"}.get(form, form)}
    assert found.tokens == {"before": 96, "weights": 32 if form == "bmm" else 40}
    for product in ("fprop", "dgrad", "wgrad"):
        rows = [row for row in expected.rows if row.module.startswith("each.") and row.product == product]
        for place, cell in enumerate(_row(found, "weights", product).cells):
            for number, operand in enumerate(cell.operands):
                summed = functools.reduce(add, (row.cells[place].operands[number].loss for row in rows))
                # The gradients may differ in the last bits: each form sums in an order of its own.
                assert operand.loss.nonzero == summed.nonzero > 0
                assert operand.loss.lost_l1_share == pytest.approx(summed.lost_l1_share, rel=1e-3)
    assert _row(found, "before", "fprop").cells == _row(expected, "before", "fprop").cells


@pytest.mark.parametrize("form", ["loop", "bmm", "grouped"])
def test_torchaos_code_for_experts_is_printed_where_it_changes_their_products(form: str) -> None:
    torchao_here.torchao()
    model, x = _Experts(form), torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    report = mpinspect.compare_recipes(model, _loss, [x], ["fp8-rowwise", "mxfp8"])
    # An expert has 40 tokens, which torchao pads in MXFP8 alone.
    rowwise, mxfp8 = map(report.expert_code, report.recipes)
    assert rowwise == ()
    assert ("config.pad_token_groups_for_grouped_mm = True" in mxfp8) == bool(mxfp8) == (form == "grouped")
    expected, text = model(x), " ".join(str(report).split())
    grouped = replace(report, functions={"weights": "_grouped_mm"}).expert_code(report.recipes[1])
    exec("\n".join(grouped).replace("MXFP8_RCEIL", "MXFP8_EMULATED_RCEIL"), {"model": model})
    # The Linear inside of the module with the experts is unchanged.
    kinds = {name: type(each.data).__name__ for name, each in model.named_parameters()}
    assert kinds == {"weights": "MXFP8TrainingWeightWrapperTensor", "before.weight": "Tensor", "before.bias": "Tensor"}
    assert bool(mxfp8) == (not torch.equal(model(x), expected))
    if form == "grouped":
        assert "An expert had 40 tokens: not a multiple of 16, and torchao 0.18 can't pad them in FP8 rowwise" in text
        assert (
            "stop after the code above. With cc 10.0, MXFP8 covers 2 of 2 layers, and pads the tokens of experts."
            in text
        )
        # FP8 rowwise covers the Linear alone.
        assert "as many" not in text
        # One code converts all that MXFP8 serves.
        assert " ".join(" ".join([*report.code("mxfp8"), *mxfp8]).split()) in text
    else:
        function = report.functions["weights"]
        assert f"leave the experts 'weights', multiplied by torch's {function} in these batches. torchao's code" in text


def _run(model: nn.Module, x: torch.Tensor, forward: Callable[..., torch.Tensor]) -> mpinspect.Inspector:
    return inspected(model, lambda _: forward(model, x).square().mean(), 2, recipes=["mxfp4"])


_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda model, x: model(x),
    "twice": lambda model, x: (model(x), model(x))[0],
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("form", ["loop", "bmm", "grouped"])
def test_a_run_measures_experts_in_one_parameter_once_a_step_and_trains_the_same(form: str, call: str) -> None:
    model, bare = _Experts(form), _Experts(form)
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    session = _run(model, x, _CALLS[call]).session()
    optimizer, steps = torch.optim.SGD(bare.parameters(), lr=0.1), [copy.deepcopy(bare)]
    for _ in range(2):
        take_step(optimizer, _CALLS[call](bare, x).square().mean())
        steps.append(copy.deepcopy(bare))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), bare.parameters(), strict=True))
    found = recipe_report(session)
    expected = [mpinspect.compare_recipes(each, _loss, [x], ["mxfp4"]) for each in steps[:2]]
    assert found is not None
    assert (found.experts, found.not_linear) == (("weights",), ("weights",))
    for product in ("fprop", "dgrad", "wgrad"):
        cells = [_row(each, "weights", product).cells[0].operands for each in expected]
        for operand, *each in zip(_row(found, "weights", product).cells[0].operands, *cells, strict=True):
            assert operand.loss == each[0].loss + each[1].loss
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class _Seen(TorchDispatchMode):
    """Counts the operators that run."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_loop_does_not_see_how_experts_are_measured() -> None:
    x = torch.randn(96, 64)
    numbers = []
    for recipes in ((), ("mxfp4",)):
        model = _Experts("loop")
        with mpinspect.Inspector(model, recipes=recipes), _Seen() as seen:
            model(x).square().mean().backward()
        numbers.append(seen.number)
    assert numbers[0] == numbers[1]


def test_an_error_while_experts_are_measured_is_noted_and_the_training_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OperandLosses, "multiplied", lambda *_: 1 / 0)
    notes = " ".join(_run(_Experts("loop"), torch.randn(96, 64), _CALLS["plain"]).session().notes)
    assert "mpinspect failed in measure (" in notes
    assert "the training is not affected" in notes


def test_experts_are_left_alone_where_something_is_compiled_and_this_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpinspect.ranges.capture.experts.compiled_graphs", lambda: 1)
    session = _run(_Experts("loop"), torch.randn(96, 64), _CALLS["plain"]).session()
    assert {record.module for record in session.precision.operands} == {"before"}
    assert "where torch.compile has compiled code: compare_recipes measures them" in " ".join(session.notes)


def test_a_product_with_a_sparse_matrix_leaves_experts_judged() -> None:
    class Graph(_Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # torch multiplies by a sparse matrix on the right, too.
            return torch.matmul(super().forward(x).reshape(96, 32), torch.eye(32).to_sparse())

    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    assert mpinspect.compare_recipes(Graph("bmm"), _loss, [x], ["mxfp8"]).experts == ("weights",)


def _mixtral(between: int) -> tuple[nn.Module, RecipeReport]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": between, "num_hidden_layers": 2}
    config = transformers.MixtralConfig(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **sizes)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).bfloat16()
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    return model, mpinspect.compare_recipes(model, lambda m, x: m(input_ids=x, labels=x).loss, [tokens], ["mxfp8"])


def test_the_code_for_experts_converts_those_that_the_recipe_serves() -> None:
    torchao_here.torchao()
    model, report = _mixtral(96)
    (recipe,) = report.recipes
    paths = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert sorted(report.experts) == sorted(paths)
    code, text = report.expert_code(recipe), render(document(report), width=120)
    assert all(line in text for line in code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(code).replace("MXFP8_RCEIL", "MXFP8_EMULATED_RCEIL"), {"model": model})
    kinds = {name: type(each.data).__name__ for name, each in model.named_parameters() if each.dim() == 3}
    assert kinds == dict.fromkeys(paths, "MXFP8TrainingWeightWrapperTensor")
    tokens = torch.arange(64).reshape(2, 32)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_experts_of_unsuited_sizes_are_left_out_of_the_code() -> None:
    _, report = _mixtral(80)
    (recipe,) = report.recipes
    assert report.unsuited(recipe) == tuple(f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1))
    names = {path for path in report.experts if repr(path) in "".join(report.expert_code(recipe))}
    assert names == {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1)}
    text = " ".join(str(report).split())
    assert "Converters of nn.Linear leave the experts 'model.layers.{0,1}.mlp.experts." in text


def test_with_another_gpu_one_code_converts_linear_layers_and_experts() -> None:
    torchao_here.torchao()
    model, x = _Experts("grouped"), torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    report = mpinspect.compare_recipes(model, _loss, [x], ["fp8-tensorwise", "mxfp8"])
    tensorwise, mxfp8 = report.recipes
    assert (report.advised, report.advised_for_experts) == (tensorwise, mxfp8)
    last = next(each for each in document(report).blocks if isinstance(each, Section)).blocks[-1]
    assert isinstance(last, Code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(last.text.replace("MXFP8_RCEIL", "MXFP8_EMULATED_RCEIL"), {"model": model})
    assert type(model.before).__name__ == "MXFP8Linear"
    assert type(model.weights.data).__name__ == "MXFP8TrainingWeightWrapperTensor"
    torchao_here.emulate(model)
    _loss(model, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("width", [80, 120])
def test_a_layer_is_named_once_above_its_three_products(width: int) -> None:
    text = render(document(mpinspect.compare_recipes(_net(), _loss, [_batch()])), width=width)
    table = text[text.index("Product by product") : text.index("fprop: input")].splitlines()
    assert all(len(row) <= width for row in table)
    assert sum("head" in row.split() for row in table) == 1
    for product in ("fprop", "dgrad", "wgrad"):
        assert sum(product in row.split() for row in table) == 2


def test_text_and_json_have_every_recipe() -> None:
    report = mpinspect.compare_recipes(_net(), _loss, [_batch()])
    found = json.loads(report.to_json())
    assert found["schema"] == "mpinspect.recipes"
    assert found["recipes"] == [recipe.name for recipe in report.recipes]
    cell = found["rows"][0]["cells"][0]
    assert cell["operands"][0]["loss"]["flushed_fraction"] == report.rows[0].cells[0].operands[0].loss.flushed_fraction
    assert "MXFP8" in str(report)
    assert "; of NVFP4, a random Hadamard transform" in " ".join(str(report).split())


def test_the_code_is_python_and_names_modules_of_the_model() -> None:
    model = _Net(classes=10)
    report = mpinspect.compare_recipes(model, _loss, [_batch()], list(RECIPES))
    names = {name for name, _ in model.named_modules()}
    recipes = [recipe for recipe in report.recipes if report.code(recipe)]
    assert len(recipes) == 5
    for recipe in recipes:
        tree = ast.parse("\n".join(report.code(recipe)))
        assigned = next(node for node in tree.body if isinstance(node, ast.Assign))
        kept = ast.literal_eval(assigned.value)
        assert {"head"} <= kept <= names


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise", "fp8-rowwise-with-gw-hp", "mxfp8", "mxfp8-wgrad-hp"])
def test_tokens_that_kernels_refuse_are_padded_or_named(name: str) -> None:
    torchao_here.torchao()
    model, x = _net(), torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    report = mpinspect.compare_recipes(model, _loss, [_batch(), x], [name])
    (recipe,) = report.recipes
    is_wide, is_mx = bool(recipe.products.wgrad.bits is None), name.startswith("mxfp8")
    assert report.uneven(recipe) == ({} if is_wide else {"blocks.0.0": 40, "blocks.1.0": 40})
    text = " ".join(str(report).split())
    refuses = "; its kernels refuse 40 tokens in 2 layers (not a multiple of 32)"
    assert (refuses in text) == (name == "mxfp8")
    assert (report.converted(recipe), report.runnable(recipe)) == (2, 2 * (name != "mxfp8"))
    assert ("Its first backward raises an error until batches are padded to multiples of 32" in text) == (
        name == "mxfp8"
    )
    assert ("It pads wgrad's 40 tokens in these batches to multiples of 16." in text) == (not is_wide and not is_mx)
    exec("\n".join(report.code(name)), {"model": model})
    if is_mx:
        torchao_here.emulate(model)
    else:
        assert model.blocks[0][0].config.pad_inner_dim == (not is_wide)
    loss = _loss(model, x)
    if name == "mxfp8":
        with pytest.raises(AssertionError, match="must be divisible by block_size 32"):
            loss.backward()
    else:
        loss.backward()


def test_tokens_that_kernels_take_are_named() -> None:
    report = mpinspect.compare_recipes(_net(), _loss, [_batch()], ["mxfp8-wgrad-hp", "fp8-rowwise", "fp8-tensorwise"])
    assert report.advised is report.recipes[1]
    text = " ".join(str(report).split())
    assert (
        "FP8 rowwise covers 2 of 2 layers. MXFP8 with wide wgrad, FP8 tensorwise cover as many. Flushing can't rank them: "
        "this is the first one for cc 8.9 that was compared." in text
    )
    assert "Its kernels take these batches (wgrad sums over 48 tokens)." in text
    assert "Code for another recipe: print('\\n'.join(report.code('fp8-tensorwise')))." in text


def test_a_recipe_whose_kernels_refuse_the_batches_is_neither_chosen_nor_offered() -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    report = mpinspect.compare_recipes(_net(), _loss, [x], ["mxfp8", "mxfp8-wgrad-hp"])
    mxfp8, wide = report.recipes
    assert (report.uneven(mxfp8), report.uneven(wide)) == ({"blocks.0.0": 48, "blocks.1.0": 48}, {})
    assert (report.converted(mxfp8), report.runnable(mxfp8)) == (2, 0)
    assert report.advised == wide
    text = " ".join(str(report).split())
    assert "MXFP8 with wide wgrad covers 2 of 2 layers. Its kernels take these batches" in text
    assert "Code for another recipe" not in text
    page = report._repr_html_()
    assert '<b class="warning">MXFP8, cc 10.0</b> passes by range' in page
    assert '<b class="good">MXFP8 with wide wgrad, cc 10.0</b> passes by range' in page


@given(st.lists(st.integers(1, 4096), min_size=1))
def test_the_least_even_number_is_a_multiple_of_a_power_of_two_only_if_all_are(numbers: list[int]) -> None:
    least = least_even(*numbers)
    assert least in numbers
    assert all((least % 2**k == 0) == all(number % 2**k == 0 for number in numbers) for k in range(13))
    assert (least_even(0, *numbers), least_even()) == (least, 0)


def test_normally_distributed_values_lose_the_reported_share() -> None:
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for name, said in NORMAL.items():
        found = [
            100 * quantization_loss(values * 2 ** (k / 8), operand).lost_l1_share
            for operand in {*RECIPES[name].products.operands()}
            for k in range(8)
        ]
        least, greatest = map(float, re.findall(r"([\d.]+)%", said))
        assert (min(found), max(found)) == pytest.approx((least, greatest), rel=0.02)


class _Attending(_Net):
    """Has a projection that its module reads without calling it, which torchao would convert in vain."""

    def __init__(self) -> None:
        super().__init__(classes=10)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.attention(x, x, x)[0])


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise", "fp8-rowwise-with-gw-hp", "mxfp8", "mxfp8-wgrad-hp"])
def test_the_code_converts_what_the_report_plans_and_the_model_trains(name: str) -> None:
    torchao_here.torchao()
    torch.manual_seed(0)
    model, x = _Attending(), torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    report = mpinspect.compare_recipes(model, _loss, [x], [name])
    recipe = report.recipes[0]
    before = {path: id(parameter) for path, parameter in model.named_parameters()}
    exec("\n".join(report.code(recipe)), {"model": model})
    ledger = {
        module: record.products
        for record in converted_layers(find_layers(model, Selection(None, None)))
        for module in record.modules
    }
    # The head's 10 classes are not a multiple of 16, and the attention's projection was not judged.
    assert ledger == {**dict.fromkeys(("blocks.0.0", "blocks.1.0"), recipe.products), "head": Products()}
    assert type(model.attention.out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    assert {path: id(parameter) for path, parameter in model.named_parameters()} == before
    if name.startswith("mxfp8"):
        torchao_here.emulate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        loss = _loss(model, x)
        take_step(optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None for parameter in model.blocks.parameters())


class _Spread(_Net):
    """Its head has an input with a large channel in each 16, so that NVFP4 flushes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = torch.ones(64).index_fill(0, torch.tensor([0, 16, 32, 48]), 60.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.sizes)  # type: ignore[no-any-return]


def _spread() -> _Spread:
    torch.manual_seed(0)
    return _Spread()


class _Autocast:
    """TransformerEngine's autocast, whose regions can be read from ``active``."""

    active: ClassVar[list[bool]] = []

    def __init__(self, enabled: bool = True, recipe: object = None) -> None:
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self) -> None:
        self.active.append(self.enabled)

    def __exit__(self, *error: object) -> None:
        self.active.pop()


def _with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {"transformer_engine.pytorch": {"autocast": _Autocast}}
    recipes = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
    made["transformer_engine.common.recipe"] = {name: type(name, (), {}) for name in recipes}
    for name in ("transformer_engine", "transformer_engine.common", *made):
        module = ModuleType(name)
        vars(module).update(made.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
def test_the_code_for_transformer_engine_computes_the_modules_to_keep_wide_outside_of_the_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_transformer_engine(monkeypatch)
    model = _spread()
    report = mpinspect.compare_recipes(model, _loss, [_batch()], [name])
    (recipe,) = report.recipes
    seen: dict[str, bool] = {}
    for path in report.modules:
        module = model.get_submodule(path)

        def forward(x: torch.Tensor, path: str = path, original: Any = module.forward) -> Any:
            seen[path] = _Autocast.active[-1]
            return original(x)

        module.forward = forward
    names: dict[str, Any] = {"model": model}
    exec("\n".join(report.code(recipe, "transformer_engine")), names)
    with _Autocast(recipe=names["recipe"]):
        _loss(model, _batch())
    assert {path for path, quantised in seen.items() if not quantised} == set(report.kept_wide(recipe))
    assert type(names["recipe"]).__name__.endswith("Scaling")


def test_a_recipe_of_transformer_engine_that_serves_more_is_advised_too() -> None:
    report = mpinspect.compare_recipes(_spread(), _loss, [_batch()], ["nvfp4"])
    (nvfp4,) = report.recipes
    assert report.advised is None
    assert report.best_of("transformer_engine") == nvfp4
    assert report.kept_wide(nvfp4) == ("head",)
    text = " ".join(str(report).split())
    assert "NVFP4 covers 2 of 2 layers, by TransformerEngine's modules under the same names" in text
    assert "NVFP4BlockScaling" in text


def test_where_a_recipe_fails_and_where_it_is_undecided_are_two_numbers() -> None:
    layers = {"before": nn.Linear(64, 64), "spread": nn.Linear(64, 64), "gate": nn.Linear(64, 32)}
    model = Of(lambda self, x: self.gate(self.spread(self.before(x) * _spread().sizes)), **layers)
    report = mpinspect.compare_recipes(model, _loss, [_batch()], ["nvfp4"])
    assert report.unserved(report.recipes[0]) == ("spread",)
    text = " ".join(str(report).split())
    assert "NVFP4, cc 10.0 fails in 1 of 2 layers, undecided in 1: at worst" in text
    assert "Routers are not converted, whatever they lose, as published recipes leave them in BF16: 'gate'" in text


def test_the_debug_file_keeps_only_unserved_products_wide() -> None:
    yaml = pytest.importorskip("yaml")
    report = mpinspect.compare_recipes(_spread(), _loss, [_batch()], ["nvfp4", "fp8-tensorwise"])
    nvfp4, fp8 = report.recipes
    sections = yaml.safe_load("\n".join(report.debug_config(nvfp4)))
    found = {}
    for section in sections.values():
        pattern = re.compile(section["layers"]["layer_name_regex_pattern"])
        gemms = section["transformer_engine"]["DisableQuantizationGEMM"]["gemms"]
        found |= {
            path: tuple(gemms) for path in report.modules if pattern.match(path) and pattern.match(f"model.{path}")
        }
    assert found == report.wide_products(nvfp4)
    assert set(found) == {"head"}
    assert report.debug_config(fp8) == ()


def test_torchtitans_list_matches_exactly_the_modules_to_keep_wide() -> None:
    report = mpinspect.compare_recipes(_spread(), _loss, [_batch()], ["nvfp4"])
    assert report.filter_fqns(report.recipes[0]) == ("head",)
    model = nn.Sequential(OrderedDict(fc=nn.Linear(64, 64), fc_out=nn.Linear(64, 64)))
    report = mpinspect.compare_recipes(
        model, lambda m, x: m(x * _spread().sizes).square().mean(), [_batch()], ["nvfp4"]
    )
    assert report.kept_wide(report.recipes[0]) == ("fc",)
    with pytest.raises(ValueError, match="'fc_out' contains it"):
        report.filter_fqns(report.recipes[0])


def test_bad_input_is_named() -> None:
    model, x = _net(), _batch()
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
        mpinspect.compare_recipes(model.parameters, _loss, [x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn"):
        mpinspect.compare_recipes(model, None, [x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\[batch\]"):
        mpinspect.compare_recipes(model, _loss, x)
    with pytest.raises(ValueError, match="no batch"):
        mpinspect.compare_recipes(model, _loss, [])
    with pytest.raises(ValueError, match="names no recipe"):
        mpinspect.compare_recipes(model, _loss, [x], ["fp7"])
    for recipes in (5, None, [None]):
        with pytest.raises(TypeError, match="such as 'mxfp8'"):
            mpinspect.compare_recipes(model, _loss, [x], recipes)  # type: ignore[arg-type]
        if recipes:
            with pytest.raises(TypeError, match="such as 'mxfp8'"):
                mpinspect.Inspector(model, recipes=recipes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name at least one"):
        mpinspect.compare_recipes(model, _loss, [x], [])
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear"):
        mpinspect.compare_recipes(nn.Conv2d(1, 1, 1), _loss, [x])
    with pytest.raises(ValueError, match=r"called a torch\.nn\.Linear"):
        mpinspect.compare_recipes(nn.ModuleList([nn.Linear(2, 2)]), lambda m, b: m[0].weight.sum(), [x])


def test_a_complex_layer_is_named_as_not_judged() -> None:
    layers = {"real": nn.Linear(64, 64), "complex": nn.Linear(64, 64, dtype=torch.complex64)}
    model = Of(lambda self, x: self.complex(self.real(x).to(torch.complex64)).abs(), **layers)
    report = mpinspect.compare_recipes(model, _loss, [_batch()], ["mxfp8"])
    assert (list(report.modules), report.not_called) == (["real"], ("complex",))


def test_a_layer_that_is_the_whole_model_has_a_name_and_infinities_are_said_first() -> None:
    report = mpinspect.compare_recipes(nn.Linear(64, 20), _loss, [torch.full((4, 64), math.inf)], ["mxfp8"])
    text = " ".join(str(report).split())
    infinities, verdict = text.index("Operands of the model itself hold infinities or NaN"), text.index("MXFP8 ")
    assert infinities < verdict
    assert "Its kernels refuse the model itself (20 is not a multiple of 32)" in text


def test_an_own_recipe_is_compared() -> None:
    own = TrainingRecipe("own", "Own", uniform(MXFP8_E4M3, MXFP4, MXFP8_E4M3), 32)
    report = mpinspect.compare_recipes(_net(), _loss, [_batch()], [own, "mxfp8"])
    first, second = _row(report, "head", "fprop").cells
    assert first.operands[0].loss == second.operands[0].loss
    assert first.operands[1].loss.noise > second.operands[1].loss.noise
    assert report.code(own) == ()
