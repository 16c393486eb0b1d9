"""Which product computes in which format: the ledger, its line in the verdict, and the findings on conversions."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from agreeing_reports import analyse
from torch import nn
from torchao_here import to_float8, to_mxfp8, torchao
from trainings import take_step

from mpinspect import Inspector
from mpinspect.numeric.recipes import RECIPES, Product, Products, recipe_of
from mpinspect.ranges.analysis.products import layers_line, modules_named
from mpinspect.ranges.capture.layers import Selection, find_layers
from mpinspect.ranges.faults.measure.converted import asked_for, converted_layers, met_converted
from mpinspect.ranges.session import CONVERTER_CALLED, LayersRecord, Precision, Progress, RunInfo, Session

TENSORWISE, MXFP8 = RECIPES["fp8-tensorwise"].products, RECIPES["mxfp8"].products


class Block(nn.Module):
    def __init__(self, width=32, bias=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.fc = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        return x + self.fc(torch.relu(self.q_proj(x) * self.k_proj(x) + self.v_proj(x)))


class Model(nn.Module):
    def __init__(self, width=32, tied=False, blocks=3, bias=False):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, bias) for _ in range(blocks)))
        self.out = nn.Linear(width, 64, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.blocks(self.embed(tokens)))


IN_BLOCKS = {f"blocks.{block}.{name}" for block in range(3) for name in ("q_proj", "k_proj", "v_proj", "fc")}


def report(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    with Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(steps):
            tokens = torch.randint(0, 64, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            take_step(optimizer, loss)
    return analyse(inspector.session())


def of(*records, asked=()):
    """The report of a healthy run with these records alone."""
    precision = Precision({"float32": 10}, autocast=("bfloat16",), layers=records, asked=asked)
    progress = Progress(steps=3, sampled_steps=3, backwards=3, ended=True)
    return analyse(Session(RunInfo("Model"), precision=precision, progress=progress))


def ids(found):
    return {finding.id: finding for finding in found.findings}


def records(model):
    return converted_layers(find_layers(model, Selection(None, None)))


# -- the ledger --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_each_product_of_a_float8_linear_has_its_recipe(name):
    (record,) = records(to_float8(nn.Sequential(nn.Linear(32, 64)), name))
    recipe = RECIPES[f"fp8-{name.replace('_', '-')}"]
    assert (record.modules, record.type, record.shape) == (("0",), "Float8Linear", (32, 64))
    assert (record.products, record.library, record.emulated) == (recipe.products, "torchao", False)
    assert recipe_of(record.products) is recipe


def test_casts_of_one_operand_are_read_one_by_one():
    torchao()
    from torchao.float8 import CastConfig, ScalingType

    # torchao writes the gradient's format into the object that it is given.
    off, also_off = (CastConfig(scaling_type=ScalingType.DISABLED) for _ in range(2))
    model = to_float8(
        nn.Sequential(nn.Linear(32, 64)),
        emulate=True,
        cast_config_input_for_grad_weight=off,
        cast_config_grad_output_for_grad_weight=also_off,
    )
    (record,) = records(model)
    assert record.products == replace(TENSORWISE, wgrad=Product())
    assert record.emulated
    assert record.products.wide == ("wgrad",)


def test_a_weight_in_a_training_wrapper_is_recognised_in_its_plain_linear():
    model = to_mxfp8(nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32)), {"0"})
    narrow, wide = records(model)
    assert (narrow.type, narrow.products, narrow.library, narrow.emulated) == ("Linear", MXFP8, "torchao", True)
    assert (wide.products, wide.library) == (Products(), "")


def test_a_float8_training_op_is_recognised():
    torchao()
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, _: isinstance(module, nn.Linear))
    (record,) = records(model)
    assert recipe_of(record.products) is RECIPES["fp8-rowwise"]


class _Format:
    def __init__(self, name):
        self.name = name


def of_engine(recipe, fp8=True, **settings):
    """A stand-in of TransformerEngine's Linear after a call under a recipe, whose class has this name."""
    made = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})()
    made.in_features, made.out_features = 64, 128
    made.weight = nn.Parameter(torch.zeros(128, 64))
    made.fp8, made.fp8_meta = fp8, {"recipe": type(recipe, (), settings)()}
    return made


@pytest.mark.parametrize(
    ("recipe", "settings", "name"),
    [
        ("Float8CurrentScaling", {"fp8_format": _Format("HYBRID")}, "fp8-tensorwise"),
        ("MXFP8BlockScaling", {"fp8_format": _Format("E4M3")}, "mxfp8"),
        ("Float8BlockScaling", {"fp8_format": _Format("E4M3")}, "fp8-block"),
        ("Float8BlockScaling", {"use_f32_scales": True}, "fp8-block-fp32"),
        ("NVFP4BlockScaling", {}, "nvfp4"),
    ],
)
def test_recipes_of_transformer_engine_are_recognised(recipe, settings, name):
    (record,) = records(nn.Sequential(of_engine(recipe, **settings)))
    assert (record.library, record.shape) == ("transformer_engine", (64, 128))
    assert recipe_of(record.products) is RECIPES[name]


def test_delayed_scaling_has_a_rule_of_its_own():
    (record,) = records(of_engine("DelayedScaling", fp8_format=_Format("HYBRID")))
    assert record.products.dgrad.left.rule == "history"
    assert record.products.dgrad.left.element == "float8_e5m2"
    assert layers_line(Precision(layers=(record,)), "BF16") == "1 of 1 Linear in FP8 delayed scaling"


def test_a_backward_that_is_kept_wide_and_an_engine_that_is_off_are_seen():
    (record,) = records(of_engine("MXFP8BlockScaling", backward_override="high_precision"))
    assert record.products.wide == ("dgrad", "wgrad")
    (off,) = records(of_engine("MXFP8BlockScaling", fp8=False))
    assert off.products == Products()


def test_similar_layers_share_a_record():
    found = records(to_float8(Model(tied=True), names=IN_BLOCKS))
    assert [(len(record.modules), record.is_head) for record in found] == [(12, False), (1, True)]


# -- the line ----------------------------------------------------------------------------------------------------------------


def test_the_verdict_begins_with_the_share_of_converted_layers():
    found = report(to_float8(Model(), names=IN_BLOCKS))
    assert found.verdict.precision.startswith("12 of 13 Linear in FP8 tensorwise, 1 in FP32: FP32 weights, no autocast")
    assert found.verdict.healthy


def test_a_model_that_is_not_converted_has_the_line_that_it_had():
    assert report(Model()).verdict.precision.startswith("Computes in FP32: FP32 weights")


def test_emulation_and_several_recipes_are_in_the_line():
    found = (
        LayersRecord(("a", "b"), "Linear", (32, 32), MXFP8, "torchao", True),
        LayersRecord(("c",), "Linear", (32, 32)),
        LayersRecord(("d",), "Float8Linear", (32, 64), TENSORWISE, "torchao"),
    )
    precision = Precision(layers=found)
    assert layers_line(precision, "BF16") == "2 of 4 Linear in MXFP8 (emulated), 1 in FP8 tensorwise, 1 in BF16"


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["h.0.q", "h.1.q", "h.2.q", "head"], "'h.{0..2}.q', 'head'"),
        (["h.0.q", "h.2.q"], "'h.{0,2}.q'"),
        (["h.0.q", "0.1.q"], "'h.0.q', '0.1.q'"),
    ],
)
def test_modules_of_blocks_are_named_once(modules, words):
    assert modules_named(modules) == words


# -- the findings ------------------------------------------------------------------------------------------------------------


def test_a_filter_that_matches_nothing_is_named():
    met_converted.clear()
    gc.collect()  # Converted models of other tests show that a filter matched.
    found = ids(report(to_float8(Model(), names={"layers.0.q_proj"})))["nothing-converted"]
    assert (found.severity, found.certainty) == ("warning", "inferred")
    assert found.evidence["layers"] == 13
    assert "convert_to_float8_training" in found.evidence["asked"]
    assert "13 layers" in found.message


def test_a_configuration_that_exists_is_a_trace():
    torchao()
    gc.collect()
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig()
    assert "config" in asked_for(records(Model()))
    assert config.emulate is False


def test_a_model_beside_a_converted_one_is_meant_to_stay_wide():
    converted = to_float8(Model())
    assert asked_for(records(Model())) == ()
    del converted


def test_a_model_after_a_converted_one_is_meant_to_stay_wide():
    """As in a notebook: the converted model is gone, and the library still notes that its converter has run."""
    met_converted.clear()
    assert "nothing-converted" not in ids(report(to_float8(Model())))
    gc.collect()
    assert "nothing-converted" not in ids(report(Model()))


def test_classes_that_torchao_does_not_convert_are_named():
    found = of(LayersRecord(("a", "b"), "Conv1D", (32, 32)), asked=(CONVERTER_CALLED,))
    assert "2 layers of the class Conv1D can't be converted" in ids(found)["nothing-converted"].message


def test_without_a_conversion_no_finding_is_about_it():
    assert not {"nothing-converted", "narrow-head"} & set(ids(of(LayersRecord(("a",), "Linear", (32, 32)))))


def test_a_head_is_known_by_its_embedding_or_its_name():
    found = report(to_float8(Model(tied=True)))
    assert ids(found)["narrow-head"].layer == "out"
    assert '{"out"}' in ids(found)["narrow-head"].code
    named = of(LayersRecord(("lm_head",), "Linear", (32, 64), TENSORWISE, "torchao"))
    assert ids(named)["narrow-head"].layer == "lm_head"


def test_a_head_is_known_by_the_models_output():
    def model():
        return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 64))

    assert ids(report(to_float8(model(), names={"1", "3"})))["narrow-head"].layer == "3"
    assert "narrow-head" not in ids(report(to_float8(model(), names={"1"})))


@pytest.mark.parametrize("name", ["blocks.0.output", "blocks.3.attention.output", "fc"])
def test_an_output_inside_of_a_block_is_not_a_head(name):
    assert "narrow-head" not in ids(of(LayersRecord((name,), "Linear", (32, 64), TENSORWISE, "torchao")))


def test_routers_are_named_and_gated_mlps_are_not():
    found = of(
        LayersRecord(("h.0.mlp.gate_proj", "h.0.moe.gate", "h.1.moe.gate"), "Linear", (32, 32), MXFP8, "torchao")
    )
    router = ids(found)["narrow-router"]
    assert router.evidence["modules"] == ["h.0.moe.gate", "h.1.moe.gate"]
    assert "'h.{0,1}.moe.gate'" in router.message


def test_values_left_out_next_to_queries_and_keys_are_named():
    names = {name for name in IN_BLOCKS if "v_proj" not in name}
    found = ids(report(to_float8(Model(), names=names)))["converted-in-part"]
    assert found.severity == "warning"
    assert found.evidence["modules"] == [f"blocks.{block}.v_proj" for block in range(3)]


@pytest.mark.parametrize(
    ("wide", "is_said"), [((0,), False), ((3,), False), ((0, 2, 3), False), ((1,), True), ((0, 2), True), ((), False)]
)
def test_blocks_inside_are_named_and_those_at_the_ends_are_not(wide, is_said):
    narrow = tuple(f"h.{block}.fc" for block in range(4) if block not in wide)
    rest = tuple(f"h.{block}.fc" for block in wide)
    records = (LayersRecord(narrow, "Linear", (32, 32), MXFP8, "torchao"), LayersRecord(rest, "Linear", (32, 32)))
    found = ids(of(*(record for record in records if record.modules)))
    assert ("converted-in-part" in found) is is_said
    if is_said:
        assert found["converted-in-part"].severity == "info"


@pytest.mark.parametrize(
    ("products", "shape", "is_said"),
    [
        (TENSORWISE, (32, 48), False),
        (TENSORWISE, (32, 40), True),
        (MXFP8, (32, 64), False),
        (MXFP8, (32, 48), True),
        (Products(), (32, 40), False),
    ],
)
def test_sizes_that_kernels_refuse_are_named(products, shape, is_said):
    assert ("sizes-refused" in ids(of(LayersRecord(("fc",), "Linear", shape, products, "torchao")))) is is_said


def test_a_bias_that_the_conversion_leaves_out_is_named_and_explains_its_missing_gradient():
    model = to_mxfp8(Model(bias=True), IN_BLOCKS)
    with torch.no_grad():
        before = model.blocks[0].fc(torch.ones(32, 32))
        model.blocks[0].fc.bias.add_(100.0)
        if not torch.equal(model.blocks[0].fc(torch.ones(32, 32)), before):
            pytest.skip("this torchao adds the bias")
    found = ids(report(model))
    assert found["bias-left-out"].severity == "error"
    assert found["bias-left-out"].evidence["modules"] == [f"blocks.{block}.fc" for block in range(3)]
    assert found["gradients-missing"].severity == "info"


def test_a_bias_that_is_added_is_not_named():
    assert "bias-left-out" not in ids(report(to_float8(Model(bias=True), names=IN_BLOCKS)))


def test_a_stub_without_settings_breaks_nothing():
    stub = type("Float8Linear", (nn.Linear,), {})(8, 8)
    stub.config = SimpleNamespace()
    (record,) = records(stub)
    assert record.products == Products()
