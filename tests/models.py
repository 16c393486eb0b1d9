"""Small real models for tests, each with a function that makes batches and a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Subject:
    """A model, its batches, and its loss: ``loss(model, batch)``."""

    model: nn.Module
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]


class Of(nn.Module):
    """A module with children by name whose forward is a function of itself and the inputs."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.run = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Times(torch.autograd.Function):
    """Multiplies x by one factor, and its gradient by another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, in_backward: float) -> torch.Tensor:
        ctx.in_backward = in_backward
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient * ctx.in_backward, None, None


class ResidualBlock(nn.Module):
    """Adds a branch to its input, so that the sum belongs to no submodule."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def cnn(dropout: float = 0.1) -> Subject:
    """Convolutions, BatchNorm, an in-place ReLU, a residual block, dropout."""
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(1, 4, 3))
    model.add_module("norm", nn.BatchNorm2d(4))
    model.add_module("relu", nn.ReLU(inplace=True))
    model.add_module("block", ResidualBlock(4))
    model.add_module("flatten", nn.Flatten())
    model.add_module("dropout", nn.Dropout(dropout))
    model.add_module("head", nn.Linear(4 * 36, 10))
    return Subject(model, lambda: (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))), _classify)


class LanguageLSTM(nn.Module):
    """Embedding, LSTM, linear head."""

    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(self.norm(hidden))


def lstm() -> Subject:
    return Subject(LanguageLSTM(), lambda: torch.randint(0, 32, (4, 9)), _next_token)


def gpt2() -> Subject:
    """A two-layer GPT-2 from a config; its loss is computed inside the model."""
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    return Subject(
        model, lambda: torch.randint(0, 64, (2, 12)), lambda m, tokens: m(input_ids=tokens, labels=tokens).loss
    )


SUBJECTS = {"cnn": cnn, "lstm": lstm, "gpt2": gpt2}


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def _next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
