"""The networks that the benchmarks train, in plain torch, with their synthetic batches and optimizers.

Batches are made on a device; every network takes ``x`` and gives logits of shape (n, classes) for targets ``y`` of shape (n,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A network to train, its batch (for a device) and its optimizer.

    Args:
        times: multiplies the benchmark's number of steps, for short steps.
        channels_last: whether it uses this memory format on a GPU.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[str], Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    times: int = 1
    channels_last: bool = False


# -- ResNet ---------------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; He et al., 2016, with the stride in the 3x3."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """ResNet-50 for depths (3, 4, 6, 3), width 64 and 1000 classes: 25.6 M parameters in 161 tensors."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not block else 1))
            channels = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet50() -> nn.Module:
    return resnet((3, 4, 6, 3), 64, 1000)


# -- GPT ------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """A GPT-2 with tied embeddings.

    GPT-2 small for 12 layers, width 768, 12 heads, 1024 tokens and the vocabulary padded to 50304: 124 M parameters. For 6
    layers, width 384, 6 heads, 256 tokens and a vocabulary of 8192: 13.9 M.
    """

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))).flatten(0, 1)


def gpt2_small() -> nn.Module:
    return GPT(12, 768, 12, 1024, 50304)


# -- Llama ----------------------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """Pre-norm block with grouped-query attention and a gated feed-forward layer, as Llama 3 has it; without rotations."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        narrow = width // heads * key_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, narrow, narrow, width))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down, self.silu = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (made(normed).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for made in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(self.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Llama 3.2 1B for 16 layers, width 2048, 32 heads, 8 for keys, 8192 hidden and a vocabulary of 128256."""

    def __init__(self, layers: int, width: int, heads: int, key_heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, key_heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens)))).flatten(0, 1)


# -- the others -------------------------------------------------------------------------------------------------------------


class LSTM(nn.Module):
    """A word-level language model: embedding, LSTM layers, vocabulary."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0]).flatten(0, 1)


def tiny_layers(layers: int, width: int, classes: int) -> nn.Module:
    """Alternating Linear and ReLU, for which costs per module or per tensor are largest."""
    body = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, classes))


# -- batches and optimizers -------------------------------------------------------------------------------------------------


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        drawn = torch.randint(vocabulary, (batch, length + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:].flatten()

    return make


def images(batch: int, size: int, classes: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        return torch.randn(batch, 3, size, size, device=device), torch.randint(classes, (batch,), device=device)

    return make


def vectors(batch: int, width: int, classes: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        return torch.randn(batch, width, device=device), torch.randint(classes, (batch,), device=device)

    return make


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # FP16 has no 1e-8, Adam's usual eps: weights stored in FP16 without masters would be NaN after a step (0/0).
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-4)
