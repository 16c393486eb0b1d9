"""record_matmuls on small Transformers models, against torch's FLOP counter, and against its autocast on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from mpinspect.shapes.record.recording import record_matmuls

transformers = pytest.importorskip("transformers")

IDS = torch.arange(64).view(2, 32) % 90
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def gpt2(**more):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, **more))


def bert(**more):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **more))


def vit(**more):
    config = transformers.ViTConfig(**SMALL, image_size=64, patch_size=16, **more)
    return transformers.ViTForImageClassification(config)


def resnet(**more):
    config = transformers.ResNetConfig(depths=[1, 1], embedding_size=16, hidden_sizes=[16, 32], **more)
    return transformers.ResNetForImageClassification(config)


def llama(**more):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=4, vocab_size=99, **more)
    return transformers.LlamaForCausalLM(config)


IMAGES = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
TEXT = {"input_ids": IDS, "labels": IDS}
MODELS = {
    "gpt2": (gpt2, TEXT),
    "bert": (bert, TEXT),
    "vit": (vit, IMAGES),
    "resnet": (resnet, IMAGES),
    "llama": (llama, TEXT),
}


def flops(recording, *roles):
    return sum(record.flops * record.calls for record in recording.matmuls if record.role in roles)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_flops_equal_torchs_counter(name, attention):
    if name == "resnet" and attention == "sdpa":
        pytest.skip("a ResNet has no attention")
    make, inputs = MODELS[name]
    model = make(**({} if name == "resnet" else {"attn_implementation": attention}))
    recording = record_matmuls(model, (), inputs)
    assert recording.notes == ()
    with FlopCounterMode(display=False) as forward:
        loss = model.to("meta")(**{key: value.to("meta") for key, value in inputs.items()}).loss
    assert flops(recording, "forward") == forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    # Fused attention recomputes the scores in its backward; the counter's run on meta tensors decomposes it.
    again = sum(record.flops // 5 for record in recording.matmuls if record.role == "backward")
    assert flops(recording, "dgrad", "wgrad", "backward") - again == backward.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_attributed(name):
    make, inputs = MODELS[name]
    model = make()
    recording = record_matmuls(model, (), inputs, dtype=torch.float16)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert {type(modules[record.module]).__name__ == record.module_type for record in recording.matmuls} == {True}
    for record in recording.matmuls:
        if record.kind != "attention":
            assert record.parameter in parameters
            assert record.parameter.rpartition(".")[0] == record.module
    assert {record.dtype for record in recording.matmuls} == {"float16"}
    assert {record.autocast for record in recording.matmuls} == {True}
    # Every weight matrix that takes part has its gradient recorded once.
    wgrads = [record.parameter for record in recording.matmuls if record.role == "wgrad"]
    assert len(wgrads) == len(set(wgrads))
    assert set(wgrads) == {
        record.parameter for record in recording.matmuls if record.role == "forward" and record.parameter
    }


def test_vocabularies_and_their_names():
    recording = record_matmuls(gpt2(), (), TEXT)
    head = [record for record in recording.matmuls if record.parameter == "lm_head.weight"]
    assert {(record.role, record.m, record.n, record.k) for record in head} == {
        ("forward", 64, 50257, 64),
        ("dgrad", 64, 64, 50257),
        ("wgrad", 50257, 64, 64),
    }
    assert recording.sizes["lm_head"][50257][0] == "config.vocab_size"
    assert recording.embeddings == {"lm_head.weight": "transformer.wte.weight"}


def test_the_mask_has_values_for_models_that_read_it():
    """Transformers drops a mask of ones, so flash attention runs; other masks need the memory-efficient kernel."""
    ones, padded = torch.ones(2, 32, dtype=torch.long), torch.ones(2, 32, dtype=torch.long)
    padded[1, 20:] = 0
    for mask, backend in ((ones, "flash"), (padded, "efficient")):
        recording = record_matmuls(bert(), (), {**TEXT, "attention_mask": mask}, dtype=torch.float16)
        assert recording.notes == ()
        assert {record.attention.backend for record in recording.matmuls if record.attention} == {backend}


def test_a_tokenizers_output_is_one_argument():
    batch = transformers.BatchEncoding({"input_ids": IDS, "labels": IDS})
    assert record_matmuls(gpt2(), batch).matmuls == record_matmuls(gpt2(), (), TEXT).matmuls
    assert not batch["input_ids"].is_meta


def test_gradient_checkpointing():
    model = gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    plain = record_matmuls(model, (), TEXT)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    recording = record_matmuls(model, (), TEXT)
    assert recording.notes == ()
    # Without a cache Transformers builds its causal mask differently, so attention is excluded.
    once = {record for record in recording.matmuls if not record.recomputed and record.kind == "gemm"}
    assert once == {record for record in plain.matmuls if record.kind == "gemm"}
    again = [record for record in recording.matmuls if record.recomputed]
    assert {record.role for record in again} == {"forward"}
    assert {record.module.split(".")[1] for record in again} == {"h"}


@pytest.mark.parametrize(
    ("way", "op", "roles"),
    [
        ("grouped_mm", "aten::_grouped_mm", {"forward", "dgrad", "wgrad"}),
        # It multiplies by a copy of the weights for each token.
        ("batched_mm", "aten::bmm", {"forward", "dgrad"}),
    ],
)
def test_experts(way, op, roles):
    if way == "grouped_mm" and not hasattr(torch, "_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped product")
    small = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 99}
    config = transformers.MixtralConfig(**small, experts_implementation=way)
    recording = record_matmuls(transformers.MixtralForCausalLM(config), (), TEXT)
    experts = [record for record in recording.matmuls if record.module.endswith("experts")]
    assert (recording.stopped, recording.notes) == ("", ())
    assert {record.op for record in experts} == {op}
    assert {record.role for record in experts} >= roles


# -- true autocast -------------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A meta tensor that claims to be on a GPU, which determines autocast."""

    @staticmethod
    def __new__(cls, meta):
        device = "cuda:0"
        return torch.Tensor._make_wrapper_subclass(cls, meta.shape, meta.stride(), dtype=meta.dtype, device=device)

    def __init__(self, meta):
        self.meta = meta

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the mode")


class Dtypes(TorchDispatchMode):
    """Records the dtypes of products under torch's own autocast.

    torch's fake tensors can't be used, since they need the driver in a torch 2.6 that is built for CUDA.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mv", "dot"):
            place = 1 if name.startswith(("addmm", "baddbmm")) else 0
            self.found.append((name, str(args[place].dtype).removeprefix("torch.")))
        args, kwargs = tree_map_only(OnGpu, lambda one: one.meta, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, OnGpu, func(*args, **kwargs))


class Mixed(nn.Module):
    """Operators of every list of autocast between products."""

    def __init__(self):
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.mix = nn.LayerNorm(8), nn.Bilinear(8, 8, 8)

    def forward(self, x):
        x = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        y = torch.bmm(self.one(x), x.transpose(1, 2)).softmax(-1)
        y = torch.einsum("bij,bjk->bik", y, x).exp().log1p()
        with torch.autocast("cuda", enabled=False):
            y = self.two(y.float())
        z = torch.baddbmm(x, y @ y.transpose(1, 2), y)
        z = torch.tensordot(z, self.two.weight, 1) + F.cosine_similarity(z, y, dim=-1).unsqueeze(-1)
        z = torch.addmm(z.select(0, 0), z.select(0, 1), self.one.weight.half())
        return self.mix(z, z.float()).pow(2).sum() + F.mse_loss(z, torch.zeros_like(z))


def conv_stack():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3), nn.GroupNorm(2, 4)
    )


@pytest.mark.parametrize("make", [Mixed, conv_stack], ids=["mixed", "convolutions"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_equal_torchs_autocast_on_a_gpu(make, dtype, monkeypatch):
    """Forward only: without CUDA, autograd refuses tensors that claim to be on a GPU."""
    model = make()
    recording = record_matmuls(model, torch.randn(2, 3, 6, 6), dtype=dtype, backward=False)
    assert recording.notes == ()
    own = [(record.op.partition("::")[2], record.dtype) for record in recording.matmuls for _ in range(record.calls)]
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: OnGpu(one.detach().to("meta")) for name, one in held.items() if one is not None})
    images = OnGpu(torch.empty(2, 3, 6, 6, device="meta"))
    with torch.no_grad(), Dtypes() as dtypes, torch.autocast("cuda", dtype):
        model(images)
    assert sorted(own) == sorted(dtypes.found)
    assert str(dtype).removeprefix("torch.") in {name for _, name in own}
