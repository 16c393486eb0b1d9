"""A small LSTM language model on the text of the Python standard library, in FP32 and in mixed precision.

    python examples/lstm_language_model.py
    python examples/lstm_language_model.py --precision bf16-amp

Both start from the same weights and see the same batches; losses, validation perplexities, the loss scale and the skipped
steps are printed. Without a GPU the 16-bit products are emulated.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import mpinspect
from mpinspect.demo.demo import stdlib_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, LENGTH, BATCH = 1024, 16, 32


class LanguageModel(nn.Module):
    """Predicts every next word: embedding 64 -> LSTM 128 -> vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.output = nn.Linear(128, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits, shape (n, length, VOCABULARY), of words, int64 of shape (n, length)."""
        states, _ = self.lstm(self.embedding(words))
        return self.output(states)


def language_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of words 1.., given those before, a mean over all of them."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def make_batches(tokens: torch.Tensor, count: int) -> list[torch.Tensor]:
    """int64 of shape (BATCH, LENGTH + 1): windows of the text, drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(tokens) - LENGTH, (count, BATCH, 1), generator=generator)
    return [tokens[start + torch.arange(LENGTH + 1)].to(DEVICE) for start in starts]


class Run:
    """One model in one precision."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel().to(DEVICE)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.mp = mpinspect.MixedPrecision(self.model, optimizer, precision)

    def step(self, words: torch.Tensor) -> float:
        self.mp.zero_grad()
        with self.mp.autocast():
            loss = language_loss(self.model, words)
        self.mp.backward(loss)
        self.mp.clip_grad_norm_(1.0)
        self.mp.step()
        return loss.item()

    @torch.no_grad()
    def perplexity(self, batches: list[torch.Tensor]) -> float:
        with self.mp.autocast():
            losses = [language_loss(self.model, words).item() for words in batches]
        return math.exp(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (%(default)s)")
    parser.add_argument("--precision", default="fp16-master", help="what FP32 is compared with (%(default)s)")
    options = parser.parse_args()

    training, validation = stdlib_tokens(100_000, VOCABULARY).split()
    batches, held_out = make_batches(training.tokens, options.steps), make_batches(validation.tokens, 4)
    full, mixed = Run("fp32"), Run(options.precision)

    print(f"{'step':>6}{'loss in fp32':>16}{'in ' + options.precision:>16}{'loss scale':>12}{'skipped':>9}")
    for number, words in enumerate(batches, start=1):
        losses = full.step(words), mixed.step(words)
        if number % max(1, options.steps // 10) == 0:
            scale = f"{mixed.mp.loss_scale:>12g}{mixed.mp.skipped_steps:>9}"
            print(f"{number:>6}{losses[0]:>16.4f}{losses[1]:>16.4f}{scale}", flush=True)

    perplexities = full.perplexity(held_out), mixed.perplexity(held_out)
    print(f"validation perplexity: fp32 {perplexities[0]:.2f}, {options.precision} {perplexities[1]:.2f}", end=" ")
    print(f"({perplexities[1] / perplexities[0] - 1:+.2%})")
    print(mixed.mp)


if __name__ == "__main__":
    main()
