"""Well-known models, built from their configurations on the meta device, have the findings that an expert would state."""

import functools
import importlib

import pytest
import torch

from mpinspect.shapes.lint import lint_shapes

# torch 2.6 can't import its compiler, which Transformers imports, while a default device is set.
importlib.import_module("torch._dynamo")
transformers = pytest.importorskip("transformers")


@functools.cache
def lint(name, gpu="hopper", dtype="float16", attention="sdpa", channels_last=False):
    with torch.device("meta"):
        model, args, kwargs = MODELS[name](attention)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        args = tuple(value.to(memory_format=torch.channels_last) for value in args)
    return lint_shapes(model, args, kwargs, dtype=dtype, gpu=gpu)


def gpt2(attention):
    config = transformers.GPT2Config(attn_implementation=attention)
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": torch.empty(8, 1024, dtype=torch.int64)}


def bert(attention):
    config = transformers.BertConfig(attn_implementation=attention)
    return transformers.BertForMaskedLM(config), (), {"input_ids": torch.empty(8, 128, dtype=torch.int64)}


def vit(attention):
    config = transformers.ViTConfig(num_labels=1000, attn_implementation=attention)
    return transformers.ViTForImageClassification(config), (torch.empty(8, 3, 224, 224),), {}


def resnet(_):
    config = transformers.ResNetConfig(num_labels=1000)
    return transformers.ResNetForImageClassification(config), (torch.empty(32, 3, 224, 224),), {}


MODELS = {"gpt2": gpt2, "bert": bert, "vit": vit, "resnet": resnet}


def by_id(report):
    return {finding.id: finding for finding in report.findings}


def above_info(report):
    return {finding.id for finding in report.findings if finding.severity != "info"}


def test_gpt2_is_its_vocabulary():
    report = lint("gpt2")
    assert above_info(report) == {"odd-vocabulary"}
    finding = by_id(report)["odd-vocabulary"]
    assert finding.layer == "lm_head"
    assert "pad vocab_size 50257 -> 50304" in finding.fix
    assert "lm_head.weight is tied to transformer.wte.weight" in finding.fix
    assert finding.evidence["calls"] == 3
    degraded = {(row.module, row.role) for row in report.matmuls if row.verdict == "degraded"}
    assert degraded == {("lm_head", role) for role in ("forward", "dgrad", "wgrad")}
    # 2 x 50257 x 768 of 2 x (12 x 12 x 768^2 + 50257 x 768) FLOPs a token, and attention: a good quarter.
    assert 0.2 < finding.evidence["flops_fraction"] < 0.32
    # Only the same three products violate the talk's rule.
    assert {(row.module, row.role) for row in report.matmuls if row.multiples_of_8 is False} == degraded


def test_gpt2_on_volta_is_padded_to_8():
    assert "pad vocab_size 50257 -> 50264" in by_id(lint("gpt2", "volta"))["odd-vocabulary"].fix


def test_gpt2_in_fp32_has_a_root_cause_first():
    report = lint("gpt2", dtype=None)
    assert report.findings[0].id == "tf32-off"
    assert "once they are on Tensor Cores" in by_id(report)["odd-vocabulary"].message
    volta = lint("gpt2", "volta", None)
    assert volta.findings[0].id == "float32"
    assert "50257 -> 50264" in by_id(volta)["odd-vocabulary"].fix


def test_berts_odd_vocabulary_is_found_in_its_head():
    report = lint("bert")
    assert above_info(report) == {"odd-vocabulary"}
    finding = by_id(report)["odd-vocabulary"]
    assert finding.layer == "cls.predictions.decoder"
    assert "pad vocab_size 30522 -> 30528" in finding.fix
    assert {row.alignment_bytes for row in report.matmuls if row.verdict == "degraded"} == {4}


def test_bert_without_fused_attention():
    report = lint("bert", attention="eager")
    assert above_info(report) == {"odd-vocabulary", "unfused-attention"}
    assert by_id(report)["unfused-attention"].evidence["modules"] == ["bert.encoder.layer.{0..11}.attention.self"]
    assert 'attn_implementation="sdpa"' in by_id(report)["unfused-attention"].fix
    assert "odd-tokens" not in by_id(report)


def test_a_vits_class_token_is_free_on_hopper_and_flagged_by_the_talk():
    report = lint("vit")
    assert above_info(report) == set()
    finding = by_id(report)["multiples-of-8-only"]
    assert "197 (196 patches and a class token)" in finding.message
    assert "no change expected" in finding.message
    assert {row.kind for row in report.matmuls if row.finding == "multiples-of-8-only"} >= {"attention"}
    assert {row.module for row in report.matmuls if row.verdict == "degraded"} == {
        "vit.embeddings.patch_embeddings.projection"
    }
    assert by_id(report)["few-input-channels"].severity == "info"
    assert "Nothing to fix" in str(report)


def test_a_vit_without_fused_attention_is_bound_by_its_class_token():
    found = by_id(lint("vit", attention="eager"))
    assert "197 tokens (196 patches and a class token)" in found["odd-tokens"].message
    assert found["odd-tokens"].fix.startswith("fuse the attention")
    assert found["unfused-attention"].severity == "warning"


def test_a_resnets_stem_is_small_and_its_layout_is_not():
    report = lint("resnet")
    assert above_info(report) == {"not-channels-last"}
    stem = by_id(report)["few-input-channels"]
    assert stem.layer == "resnet.embedder.embedder.convolution"
    assert stem.evidence["flops_fraction"] < 0.03
    assert "pad the input to 4 channels" in stem.fix
    assert {row.module for row in report.matmuls if row.verdict == "degraded"} == {stem.layer}


def test_a_resnet_in_channels_last_has_only_info_findings():
    report = lint("resnet", channels_last=True)
    assert above_info(report) == set()
    assert set(by_id(report)) == {"few-input-channels"}


def test_a_resnet_in_fp32_uses_tf32_in_its_convolutions_on_ampere_only():
    ampere = lint("resnet", "ampere", None, channels_last=True)
    assert {row.verdict for row in ampere.matmuls if row.kind == "convolution"} == {"native", "degraded"}
    assert {row.finding for row in ampere.matmuls if row.kind == "gemm"} == {"tf32-off"}
    assert by_id(ampere)["tf32-off"].severity == "info"
    assert lint("resnet", "volta", None).findings[0].id == "float32"


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(("gpt2", "volta"), ("bert", "turing"), ("vit", "ampere"), ("resnet", "ada"), ("gpt2", "blackwell")),
        *((name, "hopper") for name in MODELS),
    ],
)
def test_every_architecture_has_a_report(name, gpu):
    report = lint(name, gpu)
    assert sum(row.share for row in report.matmuls) == pytest.approx(1)
    assert len({(finding.id, finding.evidence.get("size")) for finding in report.findings}) == len(report.findings)
    assert len(report.findings) < 8
    report.to_json()


def tiny(name):
    small = {"vocab_size": 96}
    wide = small | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**wide))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide, num_key_value_heads=2))
    if name == "mixtral":
        # Without a grouped product, its own way would be an operator of Transformers that reads the router's choice.
        way = {} if hasattr(torch, "_grouped_mm") else {"experts_implementation": "batched_mm"}
        config = transformers.MixtralConfig(**wide, **way, num_key_value_heads=2, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    if name == "gpt2":
        marks = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **marks, n_layer=2, n_embd=64, n_head=4))
    config = transformers.T5Config(**small, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5", "mixtral"])
def test_models_that_read_their_mask_are_recorded_completely(name):
    with torch.device("meta"):
        model = tiny(name)
    kwargs = {
        "input_ids": torch.zeros(2, 16, dtype=torch.int64),
        "attention_mask": torch.ones(2, 16, dtype=torch.int64),
    }
    if name == "t5":
        kwargs["decoder_input_ids"] = torch.zeros(2, 16, dtype=torch.int64)
    report = lint_shapes(model, (), kwargs, dtype="bfloat16", gpu="hopper")
    assert (report.complete, report.device, report.notes) == (True, "meta", ())
    modules = {(row.module.split(".")[-1], row.role) for row in report.matmuls}
    head = "decoder" if name == "bert" else "lm_head"
    assert {(head, role) for role in ("forward", "dgrad", "wgrad")} <= modules


def test_a_gpt2_of_an_odd_width_is_one_finding():
    """Width 100, 4 heads of 25, 300 outputs of the fused projection, and a vocabulary of 512, which is suitable."""
    config = transformers.GPT2Config(n_embd=100, n_head=4, vocab_size=512, n_layer=2, bos_token_id=1, eos_token_id=1)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = {"input_ids": torch.empty(8, 128, dtype=torch.int64)}
    report = lint_shapes(model, (), ids, dtype="float16", gpu="hopper")
    assert [finding.id for finding in report.findings if finding.severity != "info"] == ["odd-size"]
    finding = by_id(report)["odd-size"]
    assert sorted(finding.evidence["consequent_sizes"]) == [25, 300]
    assert "pad config.n_embd 100 -> 128" in finding.fix
    assert "vocabulary" not in str(report)
    assert {padding.size: padding.advised for padding in report.padding} == {100: 128, 300: 384, 25: 32}
    config = transformers.GPT2Config(n_embd=128, n_head=4, vocab_size=512, n_layer=2, bos_token_id=1, eos_token_id=1)
    with torch.device("meta"):
        padded = transformers.GPT2LMHeadModel(config)
    mended = lint_shapes(padded, (), ids, dtype="float16", gpu="hopper")
    assert {row.verdict for row in mended.matmuls} == {"native"}


def test_a_chunked_projection_is_padded_in_thirds():
    class Chunked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.o = torch.nn.Linear(256, 300), torch.nn.Linear(100, 64)

        def forward(self, x):
            a, b, c = self.l(x).chunk(3, -1)
            return self.o(a * b * c)

    report = lint_shapes(Chunked(), (torch.empty(4096, 256),), dtype="float16", gpu="hopper")
    assert {padding.size: padding.advised for padding in report.padding} == {100: 104, 300: 312}
    assert [(finding.id, finding.evidence["size"]) for finding in report.findings if finding.severity != "info"] == [
        ("odd-size", 100)
    ]


def names_of(report, id="odd-size"):
    return {finding.evidence["size"]: finding.evidence["size_names"] for finding in report.findings if finding.id == id}


def test_a_setting_of_equal_number_is_not_named():
    with torch.device("meta"):
        text = {"input_ids": torch.empty(2, 64, dtype=torch.int64)}
        small = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        llama = transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(
                **small, num_key_value_heads=4, head_dim=16, num_local_experts=4, vocab_size=96
            )
        )
        mistral = transformers.MistralForCausalLM(
            transformers.MistralConfig(
                num_hidden_layers=2,
                hidden_size=108,
                intermediate_size=128,
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=18,
                sliding_window=108,
                vocab_size=96,
            )
        )
        mamba = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                num_hidden_layers=2, hidden_size=60, expand=2, num_heads=8, head_dim=15, state_size=2, vocab_size=97
            )
        )
    # The experts are 4, as is the interval of layers without rotary positions.
    assert names_of(lint_shapes(llama, (), text, "bfloat16", "hopper")) == {
        4: ["model.layers.{0..3}.feed_forward.router.out_features"]
    }
    # Keys have fewer heads of the same size, so padding the heads pads them too.
    report = lint_shapes(mistral, (), text, "bfloat16", "hopper")
    (size,) = (finding for finding in report.findings if finding.id == "odd-size")
    assert size.evidence["size_names"][0] == "config.hidden_size"
    assert not [name for name in size.evidence["size_names"] if "window" in name]
    assert "pad config.hidden_size 108 -> 144" in size.fix
    assert {padding.size: padding.to for padding in report.padding} == {108: 144, 54: 72, 18: 24}
    found = lint_shapes(mamba, (), text, "bfloat16", "hopper")
    assert names_of(found, "odd-vocabulary")[97][0] == "config.vocab_size"
    assert not [name for names in names_of(found).values() for name in names if "expand" in name]


def test_experts_that_autocast_does_not_cast_are_not_sent_under_autocast():
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4
        )
        model = transformers.MixtralForCausalLM(config)
        text = {"input_ids": torch.empty(2, 64, dtype=torch.int64)}
    found = by_id(lint_shapes(model, (), text, "bfloat16", "hopper")).get("float32-beside-autocast")
    if found is None:
        pytest.skip("this version of Transformers casts the experts' operands")
    assert "autocast does not cast" in found.message
    assert "under autocast" not in found.fix
    assert "scaled_dot_product_attention" not in found.fix
