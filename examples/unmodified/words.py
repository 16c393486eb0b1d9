"""A plain word-level language model on the text of the Python standard library, in FP32. It needs only torch.

It does not use mpinspect: `mpinspect run words.py` inspects it from outside, and finds that in FP16 its output layer would
need loss scaling.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn

TOKENS, VOCABULARY, CONTEXT = 200_000, 2048, 3


class WordModel(nn.Module):
    """The next word from the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.hidden = nn.Linear(CONTEXT * 32, 64)
        self.output = nn.Linear(64, VOCABULARY)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Logits, shape (n, VOCABULARY), of word numbers, shape (n, CONTEXT)."""
        return self.output(torch.tanh(self.hidden(self.embedding(context).flatten(1))))


def read_tokens() -> torch.Tensor:
    """Numbers of the words of the standard library's text, the commonest 0; int64, shape (TOKENS,)."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words += re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace"))
        if len(words) >= TOKENS:
            break
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words[:TOKENS]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where the weights go at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokens = read_tokens()
    model = WordModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - CONTEXT, (4096,))
        context = tokens[starts[:, None] + torch.arange(CONTEXT)]
        loss = nn.functional.cross_entropy(model(context), tokens[starts + CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.9f}")

    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
