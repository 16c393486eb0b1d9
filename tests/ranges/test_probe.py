"""probe compares predictions from FP32 counts with an FP16 pass, and does not change the model."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from models import Of
from torch import nn
from torch.nn import functional as F

import mpinspect
from mpinspect.ranges.analyse import analyse
from mpinspect.ranges.probe import probe
from mpinspect.runtime.emulation import half_arithmetic

# -- models -------------------------------------------------------------------------------------------------------------


def digit_batches(count: int = 2, size: int = 128):
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, count * size, size)]


def digits_mlp():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), classify, digit_batches()


def digits_cnn():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10)), classify, digit_batches()


def small_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    return (
        model,
        lambda m, tokens: m(input_ids=tokens, labels=tokens).loss,
        [torch.randint(0, 256, (8, 32)) for _ in range(2)],
    )


def classify(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def tiny():
    torch.manual_seed(0)
    return nn.Linear(3, 2), lambda model, x: model(x).float().square().mean(), [torch.randn(4, 3)]


MODELS = {"digits MLP": digits_mlp, "digits CNN": digits_cnn, "GPT-2": small_gpt2}


@pytest.fixture(scope="module")
def reports():
    return {name: probe(*make()) for name, make in MODELS.items()}


# -- predicted and measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_predicted_and_measured_agree_within_a_hundredth_at_scale_1(name, reports):
    report = reports[name]
    compared = [layer for layer in report.layers if layer.comparable]
    assert len(compared) >= 3
    for layer in compared:
        assert abs(layer.unscaled.difference) <= 0.01, layer.name
    assert report.largest_difference == max(abs(layer.unscaled.difference) for layer in compared)
    assert report.emulated
    assert report.device == "cpu"
    assert report.batches == 2


def test_parameters_that_are_not_compared_are_marked(reports):
    cnn = {layer.name: layer for layer in reports["digits CNN"].layers}
    # A bias before BatchNorm has no influence on the loss; BatchNorm's own parameters stay in FP32.
    assert [name for name, layer in cnn.items() if layer.rounding_noise] == ["0.bias", "3.bias"]
    assert {name for name, layer in cnn.items() if not layer.in_half} >= {"1.weight", "1.bias", "4.weight", "4.bias"}
    gpt2 = {layer.name: layer for layer in reports["GPT-2"].layers}
    assert not gpt2["transformer.wte.weight"].in_half
    fused = gpt2["transformer.h.0.attn.c_attn.bias"]
    # The key part of the fused bias is noise; the other parts are compared.
    assert 2 * 60 <= fused.unscaled.nonzero <= 2 * 64 < fused.histogram.nonzero
    assert "noise in part" in str(reports["GPT-2"])


def by_hand(make, factor, log2_scale=0):
    """Compute the same figures from the gradients directly, without a histogram."""
    model, loss_fn, batches = make()
    found = {name: [0, 0, 0, 0] for name, _ in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        (loss_fn(model, batch) * factor).backward()
        reference = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with half_arithmetic():
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(model, batch) * factor
            (loss * 2.0**log2_scale).backward()
        for name, p in model.named_parameters():
            used, flushes = reference[name] != 0, (reference[name] * 2.0**log2_scale).half() == 0
            zero = (p.grad == 0) & used
            counts = used.sum(), (used & flushes).sum(), zero.sum(), (zero & ~flushes).sum()
            found[name] = [total + int(count) for total, count in zip(found[name], counts, strict=True)]
    return found


@pytest.mark.parametrize(("exponent", "log2_scale"), [(-12, 0), (-16, 0), (-16, 10)])
def test_the_counts_equal_those_computed_from_the_gradients(exponent, log2_scale):
    model, loss_fn, batches = digits_mlp()
    factor = 2.0**exponent
    report = probe(model, lambda m, b: loss_fn(m, b) * factor, batches, loss_scale=2.0**log2_scale)
    expected = by_hand(digits_mlp, factor, log2_scale)
    for layer in report.layers:
        found = layer.scaled
        counts = [found.nonzero, found.predicted_flushed, found.measured_flushed, found.lost_upstream]
        assert counts == expected[layer.name], layer.name
        assert found.difference == pytest.approx(found.lost_upstream_fraction - found.kept_by_rounding_fraction)
    assert max(layer.unscaled.predicted_flushed_fraction for layer in report.layers) > 0.2


def test_values_flushed_upstream_are_measured_and_a_scale_prevents_them():
    """The gradient of each output is below FP16's range; a weight gradient, a sum of 1024 of these, is within it."""

    def loss_fn(model, x):
        return model(x).float().mean() * 2.0**-14

    model = nn.Linear(16, 16)
    report = probe(model, loss_fn, [torch.ones(1024, 16)])
    weight, bias = report.layers
    for layer in (weight, bias):
        assert layer.unscaled.predicted_flushed == 0
        assert layer.unscaled.measured_flushed_fraction == layer.unscaled.lost_upstream_fraction == 1
        assert layer.unscaled.relative_error == 1
        assert layer.unscaled.cosine is None
        assert layer.scaled.measured_flushed == 0
        assert layer.scaled.cosine == pytest.approx(1)
    assert report.largest_difference == 1
    assert report.loss_scale.needed
    assert report.second_scale == report.loss_scale.recommended > 1
    text = " ".join(str(report).split())
    assert "More elements became zero" in text
    assert "weight, bias" in text


def test_the_advice_follows_from_the_fp32_reference(reports):
    report = reports["digits MLP"]
    assert report.loss_scale.needed is False
    assert report.second_scale == 1.0
    assert all(layer.scaled == layer.unscaled for layer in report.layers)
    ranges = analyse(report.reference)
    assert ranges.loss_scale == report.loss_scale
    assert {layer.kind for layer in ranges.layers} == {"weight_gradient", "activation_gradient"}
    assert report.reference.progress.steps == 2


def test_both_passes_use_the_same_dropout_masks():
    model = nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.5), nn.Linear(256, 4))
    batches = [torch.randn(16, 32) for _ in range(3)]
    report = probe(model, lambda m, x: m(x).float().square().mean(), batches, loss_scale=64.0)
    for layer in report.layers:
        assert layer.unscaled.cosine > 0.9999, layer.name
        assert layer.scaled.cosine > 0.9999, layer.name
        assert layer.scaled.relative_error < 0.01


def test_overflows_are_counted():
    report = probe(*digits_mlp(), loss_scale=2.0**40)
    last = report.layers[-2].scaled
    assert last.overflowed == last.infs + last.nans > 0
    assert last.cosine is None
    assert last.relative_error is None
    assert "overflow:" in str(report)
    assert report.layers[-2].unscaled.overflowed == 0


def test_an_fp16_loss_is_noted():
    report = probe(nn.Linear(3, 2), lambda model, x: model(x).mean(), [torch.randn(4, 3)])
    assert "the loss is an FP16 tensor" in report.notes[0]
    assert "the loss is an FP16 tensor" in " ".join(str(report).split())


def test_parameters_without_a_gradient_are_named():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    report = probe(model, lambda m, x: m["used"](x).float().square().mean(), [torch.randn(4, 3)])
    assert report.without_gradient == ("unused.weight", "unused.bias")
    assert "got no gradient: unused.weight, unused.bias" in str(report)


def test_sparse_gradients_and_shared_parameters_are_compared():
    layers = {"embedding": nn.Embedding(20, 8, sparse=True), "first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    model = Of(lambda self, tokens: self.second(self.first(self.embedding(tokens))), **layers)
    model.second.weight = model.first.weight
    tokens = torch.randint(0, 20, (16,))
    report = probe(model, lambda m, t: m(t).float().square().mean(), [tokens])
    assert [layer.name for layer in report.layers] == ["embedding.weight", "first.weight", "first.bias", "second.bias"]
    assert report.layers[0].unscaled.nonzero == tokens.unique().numel() * 8


# -- unchanged state ----------------------------------------------------------------------------------------------------


def everything(model):
    """Return all state that probe must not change, comparable by ==."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "values": [
            (name, id(t), t.data_ptr(), t.detach().numpy().tobytes(), t._version)
            for name, t in model.named_parameters()
        ],
        "buffers": [(name, id(t), t.numpy().tobytes()) for name, t in model.named_buffers()],
        "grads": [(id(p.grad), None if p.grad is None else p.grad.numpy().tobytes()) for p in model.parameters()],
        "flags": [t.requires_grad for _, t in tensors] + [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "parameter hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()),
    }


def used_model():
    """Return a model in the middle of a training: one gradient is missing, one layer is frozen, one is in eval mode."""
    model, loss_fn, batches = digits_cnn()
    loss_fn(model, batches[0]).backward()
    model[0].bias.grad = None
    model[3].weight.requires_grad_(False)
    model[4].eval()
    return model, loss_fn, batches


def meddling(loss_fn):
    """Return a loss that draws from every random generator and changes flags."""

    def loss(model, batch):
        random.random(), np.random.rand(), torch.rand(1)
        model.train()
        model[3].weight.requires_grad_(True)
        return loss_fn(model, batch)

    return loss


def in_autocast(loss_fn):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    return loss


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, loss, batches: probe(model, meddling(loss), batches, loss_scale=256.0),
        lambda model, loss, batches: mpinspect.compare_recipes(model, loss, batches),
        lambda model, loss, batches: mpinspect.second_opinion(model, in_autocast(loss), batches[0]),
        lambda model, loss, batches: mpinspect.rank_precision(model, in_autocast(loss), batches[0]),
    ],
    ids=["probe", "compare_recipes", "second_opinion", "rank_precision"],
)
def test_the_model_and_the_random_state_are_unchanged(ask):
    model, loss_fn, batches = used_model()
    before = everything(model)
    ask(model, loss_fn, batches)
    assert everything(model) == before


@pytest.mark.parametrize("failing_call", [1, 2, 3, 5, 8])
def test_the_model_and_the_random_state_are_unchanged_if_the_loss_raises(failing_call):
    model, loss_fn, batches = used_model()
    before = everything(model)
    calls = itertools.count(1)

    def loss(model, batch):
        result = meddling(loss_fn)(model, batch)
        if next(calls) == failing_call:
            raise RuntimeError("on purpose")
        return result

    with pytest.raises(RuntimeError, match="on purpose"):
        probe(model, loss, batches, loss_scale=256.0)
    assert everything(model) == before


def test_parameters_changed_in_the_backward_are_restored():
    """An optimizer in the backward is a hook that changes the weights as soon as their gradient is accumulated."""
    model, loss_fn, batches = tiny()

    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad

    model.weight.register_post_accumulate_grad_hook(step)
    before = model.weight.detach().clone()
    report = probe(model, loss_fn, batches * 2, loss_scale=16.0)
    assert torch.equal(model.weight, before)
    assert report.layers[0].unscaled.cosine > 0.9999


def test_a_buffer_replaced_in_the_forward_is_restored():
    class Counter(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counter()
    calls = model.calls
    probe(model, tiny()[1], [torch.randn(4, 3)])
    assert model.calls is calls
    assert model.calls == 0


def test_surrounding_modes_have_no_effect_and_are_unchanged():
    model, loss_fn, batches = digits_mlp()
    expected = probe(model, loss_fn, batches)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = probe(model, loss_fn, batches)
        assert not torch.is_grad_enabled()
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert found.layers == expected.layers


def test_a_shuffling_loader_gives_every_pass_the_same_batches():
    model, loss_fn, _ = digits_mlp()
    (images, labels), *_ = digit_batches(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=32, shuffle=True)
    few = itertools.islice(loader, 2)
    before = torch.get_rng_state()
    report = probe(model, loss_fn, few, loss_scale=1024.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert report.batches == 2
    assert min(layer.scaled.cosine for layer in report.layers) > 0.999


# -- wrong arguments ----------------------------------------------------------------------------------------------------


def bad_inputs():
    model, loss_fn, batches = tiny()
    frozen = nn.Linear(3, 2).requires_grad_(False)
    used_up = iter([])
    nan = [torch.full((4, 3), float("nan"))]
    return {
        "no module": ((object(), loss_fn, batches), TypeError, "needs a torch.nn.Module, not object"),
        "no function": ((model, "mse", batches), TypeError, "callable as loss_fn"),
        "frozen": ((frozen, loss_fn, batches), ValueError, "no parameter that requires a gradient"),
        "half model": ((nn.Linear(3, 2).half(), loss_fn, batches), ValueError, "stored in float16.*float"),
        "lazy": ((nn.LazyLinear(2), loss_fn, batches), ValueError, "no shape yet"),
        "no batches": ((model, loss_fn, []), ValueError, "no batch"),
        "used up": ((model, loss_fn, used_up), ValueError, "used up before"),
        "one tensor": ((model, loss_fn, batches[0]), TypeError, r"not a single Tensor.*\[batch\]"),
        "one mapping": ((model, loss_fn, {"x": batches[0]}), TypeError, "not a single dict"),
        "a number": ((model, loss_fn, 3), TypeError, "not a single int"),
        "not a tensor": ((model, lambda m, x: 1.0, batches), TypeError, "returned float for batch 0"),
        "not scalar": ((model, lambda m, x: m(x), batches), ValueError, r"shape \(4, 2\).*loss.mean"),
        "no graph": ((model, lambda m, x: m(x).detach().mean(), batches), ValueError, "has no graph"),
        "nan": ((model, loss_fn, nan), ValueError, "is nan in FP32"),
        "no gradient": (
            (model, lambda m, x: torch.ones(1, requires_grad=True).sum(), batches),
            ValueError,
            "no parameter got a gradient from batch 0",
        ),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_wrong_arguments_raise_an_explained_error(name):
    arguments, error, message = bad_inputs()[name]
    with pytest.raises(error, match=message):
        probe(*arguments)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(0.0, ValueError), (1000, ValueError), (float("inf"), ValueError), ("2", TypeError), (True, TypeError)],
)
def test_a_scale_that_is_not_a_power_of_two_is_refused(scale, error):
    with pytest.raises(error, match="power of two"):
        probe(*tiny(), loss_scale=scale)


def test_the_error_for_a_transformers_output_suggests_its_loss():
    model, _, batches = small_gpt2()
    with pytest.raises(TypeError, match=r"model\(...\).loss"):
        probe(model, lambda m, tokens: m(input_ids=tokens, labels=tokens), batches)


# -- the report ---------------------------------------------------------------------------------------------------------


def test_text_and_json_have_every_layer(reports):
    report = reports["digits CNN"]
    text = str(report)
    assert text.isascii()
    assert "emulated on the CPU" in text
    assert all(layer.name in text for layer in report.layers)
    document = json.loads(report.to_json())
    assert document["schema"] == "mpinspect.probe"
    assert document["emulated"] is True
    assert document["loss_scale"]["recommended"] == report.loss_scale.recommended
    for found, layer in zip(document["layers"], report.layers, strict=True):
        assert found["name"] == layer.name
        assert sum(found["histogram"]["counts"]) == layer.histogram.nonzero
        assert found["unscaled"]["measured_flushed"] == layer.unscaled.measured_flushed
        assert found["unscaled"]["predicted_flushed_fraction"] == layer.unscaled.predicted_flushed_fraction
