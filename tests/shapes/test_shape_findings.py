"""Findings on hand-written recordings: one per cause, as an expert would state them."""

import json
import re
from dataclasses import replace
from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shape_records import attention, convolution, eager_attention, gemm, linear, recording, row_major, transposed

from mpinspect.runtime.gpus import Gpu, named, of_device
from mpinspect.shapes.analysis import FINDING_IDS, analyse_shapes
from mpinspect.shapes.analysis.group import Group
from mpinspect.shapes.analysis.roofline import Gain, gain_words, is_worth_it, partial_tiles
from mpinspect.shapes.analysis.rules import BY_ID
from mpinspect.shapes.operators import matmuls_of
from mpinspect.shapes.records import LayoutCopy, Operand

HOPPER = named("hopper")


def found(record, gpu=HOPPER):
    """Findings by id."""
    findings = analyse_shapes(record, gpu).findings
    assert len({(finding.id, finding.evidence.get("size")) for finding in findings}) == len(findings)
    assert all(finding.id in FINDING_IDS for finding in findings)
    return {finding.id: finding for finding in findings}


def severities(record, gpu=HOPPER):
    return {id: finding.severity for id, finding in found(record, gpu).items()}


def test_every_name_in_a_rules_sentence_is_a_groups_attribute():
    known = {*vars(Group), *Group.__dataclass_fields__}
    for rule in BY_ID.values():
        for sentence in (rule.message, rule.fix, rule.severity):
            if isinstance(sentence, str):
                names = {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(sentence) if name}
                assert names <= known, rule.id


def test_rules_have_ids_of_their_own():
    assert len(set(FINDING_IDS)) == len(FINDING_IDS) == 26


GOOD = linear(4096, 1024, 1024)
FP32 = linear(4096, 1024, 1024, "float32")
OWN_CODE = [replace(product, module="", parameter="", autocast=False) for product in FP32]
FP64_ATTENTION = [replace(one, math_path="dtype") for one in eager_attention(96, 64, 64, 64, "float64")]


@pytest.mark.parametrize(
    ("record", "gpu", "expected"),
    [
        (recording(*GOOD), HOPPER, {}),
        (recording(*FP32, tf32={"matmul": True, "convolution": True}), HOPPER, {}),
        (recording(convolution(batch=30)), HOPPER, {"multiples-of-8-only": "info"}),
        (recording(attention(64, 197)), HOPPER, {"multiples-of-8-only": "info"}),
        (recording(*GOOD, *OWN_CODE, autocast_dtype="float16"), HOPPER, {"float32-beside-autocast": "info"}),
        (recording(*linear(64, 64, 64, "float64")), HOPPER, {"float64": "warning"}),
        (recording(*linear(64, 64, 64, "float64")), named("volta"), {"float64": "warning"}),
        (recording(*FP64_ATTENTION), HOPPER, {"float64": "warning"}),
        (recording(*linear(64, 1023, 64)), of_device("Quadro GP100", 6, 0), {"gpu-without-tensor-cores": "info"}),
        (recording(*linear(64, 1023, 64)), Gpu("mystery"), {"gpu-unknown": "info"}),
        (recording(*linear(1, 4096, 1000)), HOPPER, {"matrix-vector": "info"}),
        (recording(*linear(1, 4096, 4095, backward=False)), HOPPER, {"matrix-vector": "info"}),
        (recording(convolution(channels=(64, 64), groups=64)), HOPPER, {"depthwise": "info"}),
    ],
)
def test_all_findings_on_a_recording(record, gpu, expected):
    assert severities(record, gpu) == expected


def test_1023_inputs_are_one_finding_with_the_sizes_name_and_the_fix():
    record = recording(*linear(4096, 1023, 1024), sizes={"fc": {1023: ("fc.in_features",)}})
    report = analyse_shapes(record, HOPPER)
    (finding,) = report.findings
    assert (finding.id, finding.severity, finding.layer) == ("odd-size", "warning", "fc")
    assert "pad fc.in_features 1023 -> 1024" in finding.fix
    assert "the rule of multiples of 8 flags them too" in finding.message
    assert finding.evidence["calls"] == 3
    assert finding.evidence["flops_fraction"] == pytest.approx(1.0)
    assert finding.evidence["verdicts"] == {"degraded": 3}
    assert [row.finding for row in report.matmuls] == ["odd-size"] * 3
    (padding,) = report.padding
    assert (padding.size, padding.to, padding.to_preferred, padding.advised) == (1023, 1024, 1024, 1024)


def test_equal_layers_are_one_finding():
    layers = [product for index in range(12) for product in linear(512, 1023, 1024, name=f"h.{index}.fc")]
    finding = found(recording(*layers))["odd-size"]
    assert finding.evidence["modules"] == ["h.{0..11}.fc"]
    assert finding.evidence["calls"] == 36
    assert finding.layer == ""


@pytest.mark.parametrize(
    ("size", "gpu", "advised", "least"),
    [
        (50257, "hopper", 50304, 50264),
        (50257, "volta", 50264, 50264),
        (30522, "hopper", 30528, 30528),
        (30522, "volta", 30528, 30528),
    ],
)
def test_known_vocabularies(size, gpu, advised, least):
    record = recording(
        *linear(1024, 768, size, name="lm_head"),
        sizes={"lm_head": {size: ("lm_head.out_features", "config.vocab_size")}},
        embeddings={"lm_head.weight": "wte.weight"},
    )
    report = analyse_shapes(record, named(gpu))
    finding = next(finding for finding in report.findings if finding.id == "odd-vocabulary")
    assert f"pad vocab_size {size} -> {advised}" in finding.fix
    assert "resize_token_embeddings(pad_to_multiple_of=" in finding.fix
    assert "lm_head.weight is tied to wte.weight" in finding.fix
    assert report.padding[0].to == least
    assert report.padding[0].names[0] == "config.vocab_size"
    multiple = int(finding.fix.split("pad_to_multiple_of=")[1].split(")")[0])
    assert -(-size // multiple) * multiple == advised


def test_the_width_of_a_tied_embedding_is_not_taken_for_a_vocabulary():
    record = recording(
        *linear(4096, 100, 100, name="h"),
        *linear(4096, 100, 512, name="o"),
        sizes={"h": {100: ("h.in_features", "h.out_features")}, "o": {512: ("e.num_embeddings", "o.out_features")}},
        embeddings={"o.weight": "e.weight"},
    )
    report = analyse_shapes(record, HOPPER)
    (finding,) = report.findings
    assert (finding.id, finding.evidence["size"], finding.evidence["calls"]) == ("odd-size", 100, 6)
    assert "vocabulary" not in finding.message + finding.fix
    assert "pad h.in_features, h.out_features 100 -> 104" in finding.fix
    assert [padding.size for padding in report.padding] == [100]


def test_both_sizes_of_a_tied_head_have_findings():
    record = recording(*linear(4096, 100, 513, name="o"), embeddings={"o.weight": "e.weight"})
    assert {(finding.id, finding.evidence["size"]) for finding in analyse_shapes(record, HOPPER).findings} == {
        ("odd-vocabulary", 513),
        ("odd-size", 100),
    }


# -- sizes that follow from others ------------------------------------------------------------------------------------


def test_a_fused_projection_follows_from_the_hidden_size():
    record = recording(
        *linear(4096, 100, 300, name="c_attn"),
        *linear(4096, 100, 512, name="fc"),
        sizes={"fc": {100: ("config.n_embd",)}},
    )
    report = analyse_shapes(record, HOPPER)
    (finding,) = report.findings
    assert (finding.id, finding.evidence["size"], finding.evidence["consequent_sizes"]) == ("odd-size", 100, [300])
    assert "300 (c_attn.weight) is 3 x 100" in finding.message
    assert "pad config.n_embd 100 -> 104" in finding.fix
    assert "which makes c_attn.weight 300 -> 312" in finding.fix
    assert [(padding.size, padding.to, padding.advised) for padding in report.padding] == [
        (100, 104, 104),
        (300, 312, 312),
    ]
    assert finding.evidence["calls"] == 6


def test_heads_are_padded_with_the_hidden_size_that_they_make_up():
    """12 heads of 25 are 300: 304 would leave heads of 25.3."""
    record = recording(*linear(4096, 300, 512, name="o"), attention(25), sizes={"o": {300: ("config.n_embd",)}})
    report = analyse_shapes(record, HOPPER)
    (finding,) = (one for one in report.findings if one.severity != "info")
    assert (finding.id, finding.evidence["consequent_sizes"]) == ("odd-size", [25])
    assert "pad config.n_embd 300 -> 384, which makes the head 25 -> 32" in finding.fix
    assert "304 would fix the layers but not the heads" in finding.fix
    assert [(padding.size, padding.advised) for padding in report.padding] == [(300, 384), (25, 32)]


def test_an_odd_hidden_size_is_not_derived_from_a_few_classes():
    record = recording(*linear(4096, 512, 100, name="a"), *linear(4096, 100, 25, name="classifier"))
    sizes = {
        one.evidence["size"]: one.evidence.get("consequent_sizes") for one in analyse_shapes(record, HOPPER).findings
    }
    assert sizes == {100: None, 25: None}


def test_a_few_coordinates_are_not_taken_for_a_hidden_size():
    """2 coordinates make 10 features: 5 x 8 would be 40 of them."""
    report = analyse_shapes(recording(*linear(65536, 2, 10)), HOPPER)
    assert {padding.size: padding.to for padding in report.padding} == {2: 8, 10: 16}
    assert "split" not in "".join(finding.fix for finding in report.findings)


def test_a_size_made_of_heads_is_explained_only_by_heads():
    """300 outputs are 3 x 100 and also 12 heads of 25; 312 would need heads of 26."""
    record = recording(*linear(4096, 100, 300, name="c_attn"), attention(25))
    report = analyse_shapes(record, HOPPER)
    assert {padding.size: padding.advised for padding in report.padding} == {100: 104, 300: 384, 25: 32}
    sizes = {
        one.evidence["size"]: one.evidence.get("consequent_sizes") for one in report.findings if "size" in one.evidence
    }
    assert sizes == {100: None, 300: [25]}


def test_an_unrelated_size_is_not_listed_as_a_consequence():
    """301 is not a multiple of 100. 300 is, but its layer neither takes 100 inputs nor feeds a layer that does."""
    other = recording(*linear(4096, 100, 301))
    assert {one.evidence["size"] for one in analyse_shapes(other, HOPPER).findings} == {100, 301}
    taken = recording(
        *linear(4096, 256, 300, name="a"), *linear(4096, 300, 64, name="b"), *linear(64, 100, 64, name="c")
    )
    assert {one.evidence["size"] for one in analyse_shapes(taken, HOPPER).findings} == {100, 300}


@pytest.mark.parametrize("name", ["attn.qkv", "h.0.c_attn", "self.in_proj"])
def test_parts_known_from_a_layers_name_are_padded_separately(name):
    finding = found(recording(*linear(4096, 256, 300, name=name)))["odd-size"]
    assert "300 -> 312" in finding.fix
    assert "each of its 3 parts 100 -> 104" in finding.fix
    assert "if its output is not split, 304 will do" in finding.fix


def test_halves_known_from_a_layers_name_are_padded_separately():
    finding = found(recording(*linear(4096, 256, 2 * 1001, name="mlp.gate_up_proj")))["odd-size"]
    assert "2002 -> 2016" in finding.fix
    assert "each of its 2 parts 1001 -> 1008" in finding.fix


def test_a_third_that_is_a_named_size_is_padded():
    record = recording(
        *linear(4096, 256, 300), sizes={"fc": {300: ("fc.out_features",)}, "e": {100: ("config.hidden_size",)}}
    )
    assert "pad fc.out_features 300 -> 312" in found(record)["odd-size"].fix


def test_parts_that_may_be_are_mentioned():
    hint = "if the layer's output is split into equal parts, pad each part"
    fix = found(recording(*linear(4096, 256, 300)))["odd-size"].fix
    assert "300 -> 304" in fix
    assert hint in fix
    # Taken whole by the next layer, or divisible by neither 2 nor 3, or an input.
    whole = recording(*linear(4096, 256, 300, name="a"), *linear(4096, 300, 256, name="b"))
    assert hint not in found(whole)["odd-size"].fix
    assert hint not in found(recording(*linear(4096, 256, 1001)))["odd-size"].fix
    assert hint not in found(recording(*linear(4096, 300, 256)))["odd-size"].fix


def test_parts_that_a_view_shows_are_padded_each():
    part = Operand((4096, 100), (300, 1), "float16", 100)
    record = recording(
        gemm(part, row_major((100, 64)), module="o"),
        *linear(4096, 256, 300, name="l"),
        sizes={"l": {300: ("l.out_features",)}},
    )
    fix = found(record)["odd-size"].fix
    assert "300 -> 312" in fix
    assert "each of its 3 parts 100 -> 104" in fix
    assert "not split" not in fix


def test_a_tied_head_is_a_vocabulary_without_a_name():
    record = recording(*linear(1024, 768, 30522, name="head"), embeddings={"head.weight": "word.weight"})
    assert "odd-vocabulary" in found(record)


@given(
    st.integers(2, 3000),
    st.integers(2, 3000),
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(["volta", "hopper"]),
)
def test_padding_fixes_a_linear_layer(inputs, outputs, dtype, architecture):
    gpu = named(architecture)
    dtype = "float16" if architecture == "volta" else dtype
    products = linear(64, inputs, outputs, dtype)
    sizes = {padding.size: padding for padding in analyse_shapes(recording(*products), gpu).padding}
    assert {row.verdict for row in analyse_shapes(recording(*products), gpu).matmuls} == (
        {"degraded"} if inputs % 8 or outputs % 8 else {"native"}
    )
    assert set(sizes) == {size for size in (inputs, outputs) if size % 8}
    for choice in ("to", "advised", "to_preferred"):
        padded = [getattr(sizes[size], choice) if size in sizes else size for size in (inputs, outputs)]
        report = analyse_shapes(recording(*linear(64, *padded, dtype)), gpu)
        assert {(row.verdict, row.multiples_of_8) for row in report.matmuls} == {("native", True)}
        assert not report.padding


def test_a_small_size_is_not_padded_to_128_bytes():
    report = analyse_shapes(recording(*linear(65536, 100, 1024)), HOPPER)
    assert (report.padding[0].to, report.padding[0].to_preferred, report.padding[0].advised) == (104, 128, 104)


def test_aligning_a_memory_bound_product_gains_little():
    """A thin product of 100 inputs is memory-bound at full rate, which limits the gain of alignment."""
    gain = {
        rows: found(recording(*linear(rows, 4096, 4095)))["odd-size"].evidence["estimated_speedup_high"]
        for rows in (64, 8192)
    }
    assert gain[8192] == pytest.approx(10, rel=0.05)
    assert gain[64] < 5


def test_a_trifle_is_info_and_may_be_slower():
    record = recording(*linear(8192, 8192, 8192), *linear(64, 1023, 64, name="small"))
    finding = found(record)["odd-size"]
    assert finding.severity == "info"
    assert "no change expected" in finding.message
    assert "may be slower" in finding.message


def test_two_odd_sizes_are_two_findings():
    ids = [
        finding.evidence["size"] for finding in analyse_shapes(recording(*linear(8192, 1023, 2047)), HOPPER).findings
    ]
    assert sorted(ids) == [1023, 2047]


def test_an_odd_number_of_rows_is_not_a_finding_above_info():
    record = recording(*linear(197, 768, 3072))
    assert severities(record) == {"multiples-of-8-only": "info"}
    finding = found(record)["multiples-of-8-only"]
    assert "196 patches and a class token" in finding.message
    assert "no change expected" in finding.message
    assert finding.evidence["sizes"] == {"M": [197], "K": [197]}
    assert finding.evidence["talk_rule_broken"] == 3


# -- dtypes ---------------------------------------------------------------------------------------------------------


def test_disabled_tf32_is_reported_before_padding():
    report = analyse_shapes(recording(*linear(4096, 1023, 1024, "float32")), HOPPER)
    assert report.findings[0].id == "tf32-off"
    assert 'set_float32_matmul_precision("high")' in report.findings[0].fix
    size = next(finding for finding in report.findings if finding.id == "odd-size")
    assert "all of them once they are on Tensor Cores" in size.message
    assert {row.finding for row in report.matmuls} == {"tf32-off"}


def test_tf32_of_convolutions_has_its_own_switch():
    record = recording(convolution(dtype="float32"), tf32={"matmul": True, "convolution": False})
    assert found(record)["tf32-off"].fix.startswith("torch.backends.cudnn.allow_tf32 = True")


def test_fp32_on_volta_has_no_tf32():
    finding = found(recording(*linear(4096, 1024, 1024, "float32")), named("volta"))["float32"]
    assert "no TF32" in finding.message
    assert "autocast" in finding.fix
    # 125 TFLOP/s against 15.7.
    assert finding.evidence["estimated_speedup_high"] == pytest.approx(125 / 15.7, rel=1e-6)


def test_fp32_under_autocast_is_named():
    off = [replace(product, autocast=False) for product in linear(4096, 1024, 1024, "float32", name="router")]
    record = recording(*linear(4096, 1024, 1024), *off, autocast_dtype="float16")
    finding = found(record)["float32-beside-autocast"]
    assert finding.severity == "warning"
    assert "router" in finding.message
    assert finding.evidence["flops_fraction"] == pytest.approx(0.5)
    # 989.4 TFLOP/s against 66.9.
    assert finding.evidence["estimated_speedup_high"] == pytest.approx(989.4 / 66.9, rel=1e-6)


def test_bf16_on_turing():
    assert (
        "use float16" in found(recording(*linear(64, 64, 64, "bfloat16")), named("turing"))["dtype-not-multiplied"].fix
    )


def test_the_gain_on_a_gpu_without_known_rates_is_unknown():
    gpu = of_device("RTX 5070", 12, 0)
    finding = found(recording(*linear(4096, 1023, 1024)), gpu)["odd-size"]
    assert "gain unknown" in finding.message
    assert finding.severity == "warning"


def test_products_that_raise_are_errors():
    product = gemm(row_major((16, 72), "float8_e4m3fn"), row_major((72, 64), "float8_e4m3fn"), op="aten::_scaled_mm")
    finding = found(recording(product))["product-raises"]
    assert finding.severity == "error"
    assert "K a multiple of 16 (72 -> 80)" in finding.message


def test_products_that_torch_refused_are_errors_on_any_gpu():
    product = gemm(
        row_major((4096, 1024)),
        row_major((1024, 64), "float32"),
        raises="mat1 and mat2 must have the same dtype",
        op="aten::addmm",
    )
    for gpu in (HOPPER, Gpu("mystery"), of_device("Quadro GP100", 6, 0)):
        finding = found(recording(product), gpu)["product-raises"]
        assert finding.severity == "error"
        assert "mat1 and mat2 must have the same dtype" in finding.message
        assert "(here float16 and float32)" in finding.fix
        assert "torch.autocast" in finding.fix
    assert "torch.autocast" not in found(recording(product, autocast_dtype="float16"))["product-raises"].fix


def test_products_that_never_run_do_not_change_the_estimate():
    bad = gemm(row_major((64, 72)), row_major((72, 64)), raises="no")
    good = linear(4096, 1023, 1024)
    alone, beside = found(recording(*good))["odd-size"], found(recording(bad, *good))["odd-size"]
    assert beside.evidence["estimated_saved_fraction_high"] == alone.evidence["estimated_saved_fraction_high"]
    only = recording(gemm(row_major((4096, 1024)), row_major((1024, 1024)), raises="no"), *linear(64, 1023, 64))
    assert "gain unknown" not in found(only)["odd-size"].message
    assert analyse_shapes(recording(bad), HOPPER).estimated_us is None


@pytest.mark.parametrize(
    ("high", "saved", "nothing"), [(1.04, 0.04, True), (1.06, 0.04, False), (3.0, 0.009, True), (3.0, 0.02, False)]
)
def test_a_gain_that_rounds_to_zero_is_not_worth_it(high, saved, nothing):
    gain = Gain(1.0, high, saved, "memory")
    assert is_worth_it(gain, 1.0) is not nothing
    words = gain_words(gain, by_padding=True)
    assert ("no change expected" in words) is nothing
    assert "estimated" in words
    assert "x1.0 to x1 " not in words


# -- structure ------------------------------------------------------------------------------------------------------


def test_eager_attention_is_named_with_its_tokens():
    layers = [product for index in range(12) for product in eager_attention(96, 197, 197, 64, name=f"h.{index}.attn")]
    by_id = found(recording(*layers))
    assert by_id["unfused-attention"].severity == "warning"
    assert "scaled_dot_product_attention" in by_id["unfused-attention"].fix
    assert by_id["unfused-attention"].evidence["calls"] == 24
    assert "197 tokens (196 patches and a class token)" in by_id["odd-tokens"].message
    assert by_id["odd-tokens"].fix.startswith("fuse the attention")


def test_an_odd_head_of_eager_attention_is_not_a_number_of_tokens():
    by_id = found(recording(*eager_attention(96, 512, 512, 60)))
    assert by_id["odd-size"].evidence["size"] == 60
    assert "odd-tokens" not in by_id


@pytest.mark.parametrize(
    ("path", "why", "fix"),
    [
        ("dimensions", "need 4 dimensions (batch, heads, length, head_dim)", "query.unsqueeze(1)"),
        ("head-size", "heads are multiples of 8", "make the head's size a multiple of 8"),
        ("strides", "no stride 1", ".contiguous()"),
        ("shapes", "batch sizes or heads", "expand key and value"),
        ("disabled", "switched off", "sdpa_kernel"),
    ],
)
def test_torchs_own_math_attention_is_one_finding(path, why, fix):
    """All findings on FP32 attention under FP16 autocast with odd tokens are replaced by the advice to use a fused kernel."""
    products = [replace(one, math_path=path, autocast=False) for one in eager_attention(96, 197, 197, 64, "float32")]
    by_id = found(recording(*products, *linear(64, 64, 64), autocast_dtype="float16"))
    assert set(by_id) == {"unfused-attention"}
    finding = by_id["unfused-attention"]
    assert why in finding.message
    assert "in FP32" in finding.message
    assert fix in finding.fix
    assert "autocast(enabled=False)" not in finding.fix
    assert finding.evidence["math_path"] == [path]


def test_math_attention_and_eager_attention_are_both_reported():
    math = [replace(one, math_path="dimensions") for one in eager_attention(96, 64, 64, 64, name="a")]
    finding = found(recording(*math, *eager_attention(96, 64, 64, 64, name="b")))["unfused-attention"]
    assert "need 4 dimensions" in finding.message
    assert "others look like attention in separate products" in finding.message


@pytest.mark.parametrize(
    ("queries", "keys", "head", "is_told"), [(1, 8, 16, False), (8, 8, 64, False), (64, 64, 64, True)]
)
def test_attention_with_few_scores_need_not_be_fused(queries, keys, head, is_told):
    """Eight scores per 144 elements of queries and keys take negligible time, fused or not."""
    told = found(recording(*eager_attention(4096, queries, keys, head)))
    assert ("unfused-attention" in told) is is_told


@pytest.mark.parametrize("is_attention", [True, False])
def test_fp32_products_outside_autocast_are_fixed_by_autocast_unless_they_are_attention(is_attention):
    products = eager_attention(96, 64, 64, 64, "float32") if is_attention else linear(64, 64, 64, "float32")
    record = recording(*(replace(one, autocast=False) for one in products), autocast_dtype="bfloat16")
    ways = found(record)["float32-beside-autocast"].fix.split("; ")
    assert ["4 dimensions" in way for way in ways] == [is_attention, False, False][-len(ways) :]
    assert "without enabled=False" in ways[-2]


def test_products_without_a_module_or_a_weight_are_not_attributed_to_the_model():
    product = replace(gemm(row_major((64, 512), "float32"), row_major((512, 64), "float32")), module="", autocast=False)
    told = found(recording(product, *linear(64, 64, 64), autocast_dtype="float16"))["float32-beside-autocast"]
    assert "in code outside of submodules (the model's own, or the script's) runs in FP32" in told.message
    assert "the model itself" not in told.message + told.fix


def test_an_images_channels_are_not_taken_for_another_layers_size():
    record = recording(
        convolution(channels=(3, 64), kernel=7, size=112, module="0"),
        *linear(4096, 64, 3, name="3"),
        sizes={"0": {3: ("0.in_channels",)}, "3": {3: ("3.out_features",)}},
    )
    told = found(record)
    assert "pad 3.out_features 3 -> " in told["odd-size"].fix
    assert "0.in_channels" not in told["odd-size"].message
    assert {padding.what: padding.names for padding in analyse_shapes(record, HOPPER).padding} == {
        "size": ("3.out_features",),
        "input channels": ("0.in_channels",),
    }


def test_chained_products_of_other_sizes_are_not_taken_for_attention():
    a, b, c = row_major((4, 64, 32)), row_major((4, 32, 128)), row_major((4, 64, 16))
    assert "unfused-attention" not in found(
        recording(gemm(a, b, module="x"), gemm(c, row_major((4, 16, 32)), module="x"))
    )


def test_attention_heads_and_masks():
    assert "60 -> 64" in found(recording(attention(60)))["attention-head-size"].fix
    masked = attention(64, 197, bias=row_major((8, 12, 197, 197)))
    assert "rows of 197 elements" in found(recording(masked))["attention-mask"].message


def test_a_stem_is_info_and_the_rest_of_the_network_fine():
    record = recording(convolution(channels=(3, 64), kernel=7, size=112), convolution(channels=(64, 64)))
    assert severities(record) == {"few-input-channels": "info"}
    finding = found(record)["few-input-channels"]
    assert "pad the input to 4 channels" in finding.fix
    assert "usually no change" in finding.message


def test_a_stem_is_called_small_only_where_it_is():
    alone = found(recording(convolution(channels=(1, 64))))["few-input-channels"].message
    assert "1 input channel," in alone
    assert "small" not in alone
    assert "100% of the FLOPs" in alone
    beside = recording(convolution(channels=(3, 64)), convolution(channels=(256, 256)))
    assert "a small share (" in found(beside)["few-input-channels"].message
    assert "3 input channels," in found(beside)["few-input-channels"].message


def test_nchw_is_a_finding_and_its_stem_is_not():
    record = recording(convolution(channels=(3, 64), channels_last=False), convolution(channels_last=False))
    finding = found(record)["not-channels-last"]
    assert "torch.channels_last" in finding.fix
    assert finding.evidence["calls"] == 1


def test_odd_channels_of_one_group():
    finding = found(recording(convolution(channels=(512, 21), kernel=1), sizes={"conv": {21: ("head.out_channels",)}}))[
        "odd-channels"
    ]
    assert "pad the channels 21 -> 24" in finding.fix
    assert "head.out_channels" in finding.message


def test_odd_channels_of_a_group_have_no_name_of_the_groups():
    finding = found(recording(convolution(channels=(16, 32), groups=4), sizes={"conv": {4: ("conv.groups",)}}))[
        "odd-channels"
    ]
    assert "4 channels of a group" in finding.message
    assert "conv.groups" not in finding.message


def test_a_mask_costs_no_more_than_its_copy():
    masked = attention(64, 1001, bias=row_major((1, 1, 1001, 1001)))
    assert 1 < found(recording(masked))["attention-mask"].evidence["estimated_speedup_high"] < 1.1


def test_a_misaligned_view_is_not_blamed_on_a_size():
    view = Operand((4096, 1024), (3076, 1), "float16", 4)
    record = recording(gemm(view, row_major((1024, 1024)), module="chunk"))
    by_id = found(record)
    assert set(by_id) == {"misaligned-view"}
    assert ".contiguous()" in by_id["misaligned-view"].fix


def test_heads_side_by_side_are_blamed_on_the_heads_size():
    """Rows have 240 elements and heads 60, so only the stride between heads is odd."""
    q = Operand((4, 64, 60), (60, 240, 1), "float16")
    record = recording(
        gemm(q, row_major((4, 60, 64)), module="heads"),
        sizes={"heads": {60: ("config.num_attention_heads", "head_dim")}},
    )
    by_id = found(record)
    assert set(by_id) == {"odd-size"}
    assert by_id["odd-size"].evidence["size_names"] == ["head_dim"]


def test_a_chunk_that_starts_at_an_odd_multiple_of_its_size():
    chunk = Operand((64, 20), (64, 1), "float16", 20)
    assert found(recording(gemm(chunk, row_major((20, 64)), module="chunk")))["odd-size"].evidence["size"] == 20


def test_the_row_of_a_fused_projection_is_its_named_size():
    view = Operand((4096, 1023), (3069, 1), "float16")
    record = recording(
        gemm(view, row_major((1023, 1024)), module="chunk"), sizes={"qkv": {3069: ("qkv.out_features",)}}
    )
    assert found(record)["odd-size"].evidence["size"] == 3069


def copied(*matmuls, module, share=0.5):
    """Return the finding on layout copies that take this share of the products' time."""
    us = analyse_shapes(recording(*matmuls), HOPPER).estimated_us
    moved = int(us * share * HOPPER.bandwidth_gb_s * 1e3)
    return found(recording(*matmuls, copies=(LayoutCopy(module, "layout", moved, 1),)))["layout-copies"]


def test_channels_last_is_advised_for_copies_of_convolutions_only():
    assert "channels_last throughout" in copied(convolution(channels_last=False), module="stage").fix
    most = linear(65536, 4096, 4096)
    small = convolution(channels=(8, 8), size=8, channels_last=False)
    assert "channels_last" not in copied(small, *most, module="fc").fix
    assert "reshape" in copied(*most, module="fc").fix


def test_copies_around_heads():
    fused = copied(attention(64, module="h.attn"), module="h.attn")
    assert (fused.severity, fused.fix) == ("info", "")
    assert "no change expected" in fused.message
    eager = copied(*eager_attention(96, 128, 128, 64, name="h.attn"), module="h.attn.k_proj")
    assert (eager.severity, eager.fix.startswith("fused attention")) == ("warning", True)
    assert "channels_last" not in eager.fix


def test_an_incomplete_recording_is_the_first_finding():
    record = recording(*linear(64, 1023, 64), stopped="the forward stopped in h.3: RuntimeError: no")
    first, *others = analyse_shapes(record, HOPPER).findings
    assert (first.id, first.severity) == ("recording-incomplete", "error")
    assert "the forward stopped in h.3: RuntimeError: no; every figure here is of the 3 products" in first.message
    assert first.evidence["calls"] == 3
    assert "--real" in first.fix
    assert [finding.id for finding in others] == ["odd-size"]
    assert "--real" not in found(replace(record, device="cpu"))["recording-incomplete"].fix


@pytest.mark.parametrize(("products", "words"), [((), "no matrix product"), (linear(0, 64, 64), "0 FLOP")])
def test_an_empty_recording_is_an_error(products, words):
    finding = found(recording(*products))["nothing-recorded"]
    assert finding.severity == "error"
    assert words in finding.message
    stopped = found(recording(stopped="the forward stopped"))
    assert set(stopped) == {"recording-incomplete"}
    assert "no matrix product had run until then" in stopped["recording-incomplete"].message


def test_sentences_on_one_product_are_in_the_singular():
    one = recording(replace(linear(197, 1024, 1024, backward=False)[0]))
    assert "1 product (100% of the FLOPs) breaks" in found(one)["multiples-of-8-only"].message
    preferred = found(recording(linear(4096, 1032, 1032, backward=False)[0]))["prefers-128-bytes"]
    assert "1 product (100% of the FLOPs) in fc is aligned" in preferred.message


def test_layout_copies_are_weighed_against_the_products():
    few = recording(*linear(4096, 1024, 1024), copies=(LayoutCopy("x", "layout", 1000, 1),))
    assert found(few) == {}
    many = recording(*linear(4096, 1024, 1024), copies=(LayoutCopy("x", "layout", 500_000_000, 2),))
    assert found(many)["layout-copies"].severity == "warning"
    casts = recording(*linear(4096, 1024, 1024), copies=(LayoutCopy("x", "dtype", 500_000_000, 2),))
    assert found(casts) == {}


def test_inductor_is_mentioned_for_compiled_models_only():
    record = recording(*linear(4096, 1023, 1024))
    assert "Inductor" not in found(record)["odd-size"].fix
    assert "Inductor may pad this" in found(replace(record, compiled=True))["odd-size"].fix


def test_odd_channels_are_reported_although_tf32_is_off():
    record = recording(convolution(channels=(64, 21), dtype="float32"), tf32={"matmul": False, "convolution": False})
    assert {"tf32-off", "odd-channels"} <= set(found(record))


def test_shares_add_up():
    report = analyse_shapes(recording(*linear(64, 64, 64), *linear(64, 1023, 64), attention(), convolution()), HOPPER)
    assert sum(row.share for row in report.matmuls) == pytest.approx(1)
    assert sum(report.flops_by_verdict.values()) == report.flops
    assert sum(report.calls_by_talk.values()) == report.calls


def test_a_product_weighs_in_proportion_to_its_calls():
    once, often = linear(64, 64, 64, backward=False)[0], replace(linear(64, 1023, 64, backward=False)[0], calls=3)
    report = analyse_shapes(recording(once, often), HOPPER)
    assert report.calls == 4
    assert report.flops == once.flops + 3 * often.flops
    assert report.matmuls[1].share == pytest.approx(3 * often.flops / report.flops)


# -- fixes that are already applied, findings without effect, order -------------------------------------------------------


def test_four_input_channels_are_not_padded_to_four():
    report = analyse_shapes(recording(convolution(channels=(4, 64), size=112, kernel=7)), HOPPER)
    assert "pad" not in next(finding for finding in report.findings if finding.id == "few-input-channels").fix
    assert report.padding == ()
    assert [padding.to for padding in analyse_shapes(recording(convolution(channels=(3, 64))), HOPPER).padding] == [4]


def test_value_heads_of_an_odd_size_are_padded_and_no_others():
    report = analyse_shapes(recording(attention(64, value=60)), HOPPER)
    assert [(padding.size, padding.to) for padding in report.padding] == [(60, 64)]


def test_channels_last_is_not_advised_where_it_is_set():
    copies = (LayoutCopy("stem", "layout", 10**9, 4),)
    for channels_last in (True, False):
        (finding,) = (
            one
            for one in analyse_shapes(
                recording(convolution(channels_last=channels_last), copies=copies), HOPPER
            ).findings
            if one.id == "layout-copies"
        )
        assert ("channels_last" in finding.fix) != channels_last


def test_tf32_is_not_advised_on_a_gpu_without_it():
    products = [replace(one, autocast=False) for one in linear(4096, 1024, 1024, "float32")]
    record = recording(*products, *linear(4096, 1024, 1024), autocast_dtype="float16")
    for gpu, has_tf32 in (("turing", False), ("hopper", True)):
        assert ("set_float32_matmul_precision" in found(record, named(gpu))["float32-beside-autocast"].fix) == has_tf32


def test_findings_without_effect_are_counted_but_not_listed():
    record = recording(
        *linear(4096, 4096, 4096, name="a"),
        *linear(4096, 4096, 3, name="tiny"),
        gemm(row_major((4096, 4096)), row_major((4096, 1)), module="vector"),
        copies=(LayoutCopy("a", "layout", 10**8, 4),),
    )
    report = analyse_shapes(record, HOPPER)
    assert [finding.id for finding in report.listed] == ["layout-copies"]
    assert sorted(finding.id for finding in report.unchanging) == ["matrix-vector", "odd-size"]
    assert report.findings == (*report.listed, *report.unchanging)
    text = str(report)
    assert "2 more findings would have no measurable effect: " in text
    assert "pad the size 3" not in text
    assert "Sizes to pad" not in text
    assert "Nothing to fix" not in text
    stored = json.loads(report.to_json())
    assert [one["id"] for one in stored["findings"] if one["evidence"].get("changes_nothing")] == [
        finding.id for finding in report.unchanging
    ]
    assert [(one["from"], one["worth_it"]) for one in stored["padding"]] == [(3, False)]


def test_findings_are_ordered_by_lost_time():
    record = recording(
        *linear(8192, 1023, 4096, name="fast"),
        *eager_attention(96, 2048, 2048, 64),
        *linear(8192, 4096, 4095, name="slow"),
    )
    lost = [finding.evidence["estimated_saved_fraction_high"] for finding in analyse_shapes(record, HOPPER).listed]
    assert len(lost) > 2
    assert lost == sorted(lost, reverse=True)


# -- tiles, waves, blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "batch", "sms", "least", "most"),
    [
        (4096, 4096, 64, 1, None, 1.0, 1.0),
        (130, 130, 64, 1, None, (192 / 130) ** 2, (192 / 130) ** 2),
        # 130 x 130 tiles of 128 fill 128 waves and a bit: less than a hundredth is lost.
        (130 * 128, 130 * 128, 64, 1, 132, 1.0, 129 * 132 / 130**2),
        # 11 x 12 tiles are one wave.
        (11 * 128, 12 * 128, 64, 1, 132, 1.0, 1.0),
        (64, 64, 64, 133, 132, 264 / 133, 264 / 133),
        # A long sum is split: 16 parts of 133 tiles fill 16.1 waves.
        (64, 64, 16 * 512, 133, 132, 17 * 132 / 16 / 133, 17 * 132 / 16 / 133),
    ],
)
def test_tiles_and_waves_that_are_not_full(m, n, k, batch, sms, least, most):
    assert least * 0.9999 <= partial_tiles(m, n, k, batch, sms) <= most * 1.0001


def test_partial_waves_are_part_of_the_estimate_and_no_finding():
    full = analyse_shapes(recording(*linear(11 * 128 * 8, 4096, 12 * 128)), HOPPER)
    assert full.estimated_partial_tiles_fraction is not None
    small = analyse_shapes(recording(*linear(11 * 128 + 1, 960, 12 * 128, backward=False)), HOPPER)
    assert small.estimated_partial_tiles_fraction > 0.1
    assert [finding.id for finding in small.findings] == ["multiples-of-8-only"]
    assert "with tiles and waves that are not full (estimated" in " ".join(str(small).split())
    assert (
        analyse_shapes(recording(*linear(4096, 4096, 4096)), Gpu("?", "hopper", True)).estimated_partial_tiles_fraction
        is None
    )


def test_padding_that_adds_much_work_may_be_slower():
    """12 heads of 25 become 12 heads of 32: 300 -> 384, more than a quarter of work more."""
    record = recording(*linear(65536, 300, 4096, name="o"), attention(25), sizes={"o": {300: ("config.n_embd",)}})
    finding = found(record)["odd-size"]
    assert finding.evidence["estimated_speedup_low"] < 0.9
    assert "padding may be slower" in finding.message


@pytest.mark.parametrize(
    ("scale", "packed", "block", "padded"),
    [
        (row_major((64, 33), "float8_e8m0fnu"), False, 32, 1056),
        (row_major((64, 65), "float8_e4m3fn"), True, 16, None),
        (row_major((64, 9), "float32"), False, 128, 1152),
        (row_major((64, 1), "float32"), False, 0, None),
        (row_major((), "float32"), False, 0, None),
    ],
)
def test_rows_that_no_blocks_fill_are_padded_to_whole_blocks(scale, packed, block, padded):
    dtype = "float4_e2m1fn_x2" if packed else "float8_e4m3fn"
    k = 520 if packed else 1040
    a, b = row_major((64, k), dtype), transposed(row_major((256, k), dtype))
    records = matmuls_of("aten::_scaled_mm", [a, b, scale, scale], output=row_major((64, 256), "bfloat16"))
    assert [record.block for record in records] == [block]
    fixes = {id: finding.fix for id, finding in found(recording(*records), named("blackwell")).items()}
    assert fixes.get("partial-blocks") == (f"pad the summed size 1040 -> {padded}" if padded else None)
