"""A small GPT-2 of Hugging Face Transformers, built from a config: nothing is downloaded.

    pip install mpinspect[examples]
    python examples/transformers_gpt2.py

It learns the text of the Python standard library, word by word. Afterwards `probe` compares the prediction from the FP32
gradients with an FP16 pass of the same batch.
"""

from __future__ import annotations

import argparse

import torch
import transformers

import mpinspect
from mpinspect.demo.demo import stdlib_tokens

VOCABULARY, LENGTH = 1024, 64


def make_model() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model = transformers.GPT2LMHeadModel(config)
    model.train()
    return model


def language_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (%(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokens = stdlib_tokens(100_000, VOCABULARY).tokens
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch() -> torch.Tensor:
        starts = torch.randint(len(tokens) - LENGTH, (16, 1))
        return tokens[starts + torch.arange(LENGTH)]

    with mpinspect.Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(options.steps):
            loss = language_loss(model, batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    print(inspector.report())
    print(f"last loss: {loss.item():.3f}")
    print(mpinspect.probe(model, language_loss, [batch()]))


if __name__ == "__main__":
    main()
