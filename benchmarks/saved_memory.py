"""The memory that autograd saves for the backward, in every precision: ResNet-50 and GPT-2 small, real shapes.

    python benchmarks/saved_memory.py [--json benchmarks/results/saved_memory-cpu.json]

Measures the bytes of the distinct storages that autograd saves between forward and backward, through
``torch.autograd.graph.saved_tensors_hooks``, with and without the model's own parameters. ResNet-50: batch 8, 224x224. GPT-2
small: 124M parameters, one sequence of 1024 tokens, no dropout, attention through ``scaled_dot_product_attention``, which saves
no scores. "lean" rows compute the cross-entropy of half logits without saving its FP32 log-softmax, otherwise the largest
tensor. On a CPU 16-bit arithmetic is emulated, and saves the same tensors as CUDA's kernels. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

from mpinspect.runtime.emulation import half_arithmetic
from mpinspect.training.precision import PRECISIONS, Precision, convert_model
from mpinspect.training.recompute import LeanCrossEntropy

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass
class Saved:
    """Bytes that autograd saves.

    Args:
        activations: bytes other than the model's own parameters and buffers.
        parameters: bytes of the model's own parameters and buffers.
        float32_activations: the FP32 part of ``activations``.
        largest_float32: the shape and bytes of the largest FP32 activation; "" without one.
    """

    activations: int
    parameters: int
    float32_activations: int
    largest_float32: str


# -- the models -------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with BatchNorm around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


def resnet50(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Stages of 3, 4, 6 and 3 blocks; ``width`` 64 and 1000 classes are ResNet-50."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            model.append(Bottleneck(inputs, inner, stride=2 if block == 0 and stage > 0 else 1))
            inputs = 4 * inner
    return model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)])


class Block(nn.Module):
    """GPT-2's block: LayerNorm, attention, LayerNorm, four times wider GELU layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2, its head tied to the embedding; the defaults are GPT-2 small."""

    def __init__(
        self, width: int = 768, heads: int = 12, layers: int = 12, vocabulary: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def image_loss(batch: int, size: int, classes: int = 1000) -> Loss:
    """Cross-entropy of a classifier on noise, ``batch`` square images."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return lambda model: F.cross_entropy(model(images), labels)


def text_loss(batch: int, length: int, vocabulary: int = 50257) -> Loss:
    """Cross-entropy of the next token on noise."""
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# -- the measurement --------------------------------------------------------------------------------------------------


def saved_for_backward(model: nn.Module, loss: Loss, precision: Precision, lean: bool = False) -> Saved:
    """Convert the model in place, run the forward, and add up the saved tensors."""
    convert_model(model, precision)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}  # by storage; holding the tensors prevents the reuse of their addresses

    def pack(tensor: torch.Tensor) -> None:
        # No backward follows. Returning the tensor would create a reference cycle for a node that saves its own output.
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    with forward_in(precision, lean), torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        result = loss(model)
    assert math.isfinite(result.item())
    sizes: Counter[str] = Counter()
    for address, tensor in kept.items():
        sizes["parameters" if address in own else str(tensor.dtype)] += tensor.untyped_storage().nbytes()
    full = [tensor for address, tensor in kept.items() if address not in own and tensor.dtype == torch.float32]
    largest = max(full, key=torch.Tensor.numel, default=None)
    return Saved(
        activations=sum(sizes.values()) - sizes["parameters"],
        parameters=sizes["parameters"],
        float32_activations=sizes["torch.float32"],
        largest_float32=""
        if largest is None
        else f"{tuple(largest.shape)}, {largest.untyped_storage().nbytes()} bytes",
    )


def forward_in(precision: Precision, lean: bool) -> ExitStack:
    """Return the context of a precision's forward on a CPU."""
    stack = ExitStack()
    if precision.autocast:
        stack.enter_context(half_arithmetic())
        stack.enter_context(torch.autocast("cpu", precision.compute))
    if lean:
        stack.enter_context(LeanCrossEntropy())
    return stack


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss]]] = {
    "ResNet-50, batch 8, 224x224": (resnet50, lambda: image_loss(8, 224)),
    "GPT-2 small, 1 x 1024 tokens": (GPT2, lambda: text_loss(1, 1024)),
}
#: (precision, lean cross-entropy). "fp16-pure" saves the same tensors as "fp16-master".
ROWS = [("fp32", False), ("fp16-amp", False), ("fp16-amp", True), ("bf16-amp", False)]
ROWS += [("fp16-master", False), ("fp16-master", True), ("bf16-master", False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    results = []
    for subject, (make, make_loss) in SUBJECTS.items():
        print(f"{subject}\n{'':18} activations           with parameters       FP32 part   largest FP32 tensor kept")
        full: Saved | None = None
        for name, lean in ROWS:
            torch.manual_seed(0)
            saved = saved_for_backward(make(), make_loss(), PRECISIONS[name], lean)
            full = full or saved
            print(row(f"{name}, lean" if lean else name, saved, full), flush=True)
            results.append({"subject": subject, "precision": name, "lean_cross_entropy": lean, **asdict(saved)})
    if options.json:
        from machine import write_results

        write_results(options.json, results)


def row(name: str, saved: Saved, full: Saved) -> str:
    """Format a line of the table, with fractions of FP32's bytes."""
    both, full_both = saved.activations + saved.parameters, full.activations + full.parameters
    return (
        f"{name:18} {saved.activations / 2**20:8.1f} MiB {saved.activations / full.activations:5.3f}  "
        f"{both / 2**20:8.1f} MiB {both / full_both:5.3f}  {saved.float32_activations / 2**20:8.1f} MiB   "
        f"{saved.largest_float32}"
    )


if __name__ == "__main__":
    main()
