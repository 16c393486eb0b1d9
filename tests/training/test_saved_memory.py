"""Tensors saved for the backward are half, and take at most 0.6 of FP32's bytes, measured by autograd's hooks."""

import importlib.util
import itertools
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.training.precision import PRECISIONS
from mpinspect.training.recompute import LeanCrossEntropy

FP16, FP32 = torch.float16, torch.float32
#: GPT-2 small with a sixth of its width and vocabulary, so that the ratio of logits to blocks is preserved.
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 128, 2, 12, 50257 // 6, 64


def _load() -> ModuleType:
    """Import the benchmark, which has the models and the measurement, in full size."""
    path = Path(__file__).parents[2] / "benchmarks" / "saved_memory.py"
    spec = importlib.util.spec_from_file_location("saved_memory_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = _load()


def small_gpt2() -> nn.Module:
    return benchmark.GPT2(WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH)


SUBJECTS = {
    "resnet-50": (benchmark.resnet50, lambda: benchmark.image_loss(2, 64)),
    "gpt-2": (small_gpt2, lambda: benchmark.text_loss(2, LENGTH, VOCABULARY)),
}

#: BatchNorm saves mean and 1/deviation of 26,560 channels; attention saves one number per row and head.
FLOAT32_BYTES = {"resnet-50": 4 * 2 * 26_560, "gpt-2": 4 * LAYERS * HEADS * 2 * LENGTH}


def measure(subject: str, precision: str, lean: bool = True):
    torch.manual_seed(0)
    make, make_loss = SUBJECTS[subject]
    return benchmark.saved_for_backward(make(), make_loss(), PRECISIONS[precision], lean and precision != "fp32")


@pytest.fixture(scope="module")
def full():
    return {subject: measure(subject, "fp32") for subject in SUBJECTS}


def test_the_models_have_their_published_sizes():
    with torch.device("meta"):
        assert sum(p.numel() for p in benchmark.resnet50().parameters()) == 25_557_032
        assert sum(p.numel() for p in benchmark.GPT2().parameters()) == 124_439_808


@pytest.mark.parametrize("precision", ["fp16-master", "bf16-master"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_half_weights_save_at_most_six_tenths_of_fp32s_bytes(full, subject, precision):
    saved = measure(subject, precision)
    assert saved.activations <= 0.6 * full[subject].activations
    assert saved.activations + saved.parameters <= 0.6 * (full[subject].activations + full[subject].parameters)
    assert saved.float32_activations == FLOAT32_BYTES[subject]


def test_torchs_cross_entropy_saves_its_log_softmax_in_fp32(full):
    """It is the only large FP32 tensor of a language model, and slightly exceeds the bound of 0.6."""
    saved, lean = measure("gpt-2", "fp16-master", lean=False), measure("gpt-2", "fp16-master")
    tokens = 2 * LENGTH
    assert saved.largest_float32 == f"({tokens}, {VOCABULARY}), {4 * tokens * VOCABULARY} bytes"
    assert (
        saved.float32_activations - lean.float32_activations == 4 * tokens * VOCABULARY + 4
    )  # nll_loss: its weights' sum
    assert saved.activations - lean.activations == 2 * tokens * VOCABULARY + 4  # the half logits are saved instead
    assert 0.6 < saved.activations / full["gpt-2"].activations < 0.65


def test_under_amp_a_language_model_saves_nearly_as_much_as_in_fp32(full):
    """AMP saves FP32 inputs of LayerNorm and half copies of FP32 weights; storing half weights avoids both."""
    amp, master = measure("gpt-2", "fp16-amp", lean=False), measure("gpt-2", "fp16-master", lean=False)
    assert amp.activations > 0.9 * full["gpt-2"].activations
    assert master.activations < 0.7 * amp.activations


# -- the lean cross-entropy -----------------------------------------------------------------------------------------


def loss_and_gradient(lean: bool, logits: torch.Tensor, target: torch.Tensor, **options):
    logits, kept = logits.clone().requires_grad_(), []
    with half_arithmetic(), torch.autocast("cpu", FP16):
        mode = LeanCrossEntropy()
        if lean:
            mode.__enter__()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.detach(), lambda t: t):
            loss = nn.CrossEntropyLoss(**options)(logits, target)
        if lean:
            mode.__exit__(None, None, None)
        (loss * 1024).sum().backward()
    return loss, logits.grad, [tensor.dtype for tensor in kept if tensor.numel() >= logits.numel()]


@pytest.mark.parametrize("soft", [False, True])
def test_it_gives_the_same_loss_and_gradient_to_the_last_bit(soft):
    logits, target = torch.randn(20, 50).half() * 5, torch.randint(0, 50, (20,))
    target[3] = 3
    if soft:
        target = torch.rand(20, 50).softmax(1).half()
    ignored = (-100,) if soft else (-100, 3)
    weights = (None, torch.rand(50))
    for reduction, smoothing, ignore, weight in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1), ignored, weights
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore, "weight": weight}
        loss, gradient, kept = loss_and_gradient(False, logits, target, **options)
        lean_loss, lean_gradient, lean_kept = loss_and_gradient(True, logits, target, **options)
        assert lean_loss.dtype == loss.dtype == FP32
        assert torch.equal(lean_loss, loss)
        assert torch.equal(lean_gradient, gradient)
        assert gradient.dtype == FP16
        assert FP32 in kept
        assert set(lean_kept) == {FP16}


def test_everything_else_is_left_to_torch():
    full = torch.randn(4, 5, requires_grad=True)
    half, target = full.detach().half().requires_grad_(), torch.tensor([0, 1, 2, 3])
    with LeanCrossEntropy():
        assert F.cross_entropy(half, target).grad_fn.name() != "_RecomputedBackward"  # no autocast
        with torch.autocast("cpu", FP16):
            assert F.cross_entropy(half, target).grad_fn.name() == "_RecomputedBackward"
            assert F.cross_entropy(full, target).grad_fn.name() != "_RecomputedBackward"
            assert F.mse_loss(half, full).dtype == FP32
    assert F.cross_entropy(full, target).grad_fn.name() != "_RecomputedBackward"


def test_learned_targets_have_a_gradient():
    logits, target = torch.randn(4, 5).half(), torch.rand(4, 5)
    gradients = []
    for mode in (nullcontext(), LeanCrossEntropy()):
        learned = target.clone().requires_grad_()
        with torch.autocast("cpu", FP16), mode:
            F.cross_entropy(logits, learned).backward()
        gradients.append(learned.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_it_compiles_in_one_graph():
    logits, target = torch.randn(4, 5).half().requires_grad_(), torch.tensor([0, 1, 2, 3])
    compiled = torch.compile(lambda x: F.cross_entropy(x * 2, target), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", FP16):
        expected = F.cross_entropy(logits * 2, target)
        with LeanCrossEntropy():
            assert torch.equal(compiled(logits), expected)
