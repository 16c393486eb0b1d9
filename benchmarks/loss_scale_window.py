"""Tests the recommended window of loss scales: trains the demo's model in FP16 at scales inside and outside of it.

    python benchmarks/loss_scale_window.py [--json benchmarks/results/loss_scale_window-cpu.json] [--steps 160]

On a CPU the FP16 products are emulated as Tensor Cores compute them (FP16 operands, FP32 sums, FP16 results). A step
whose gradients are not finite is skipped, as a loss scaler would. About a minute a scale on two cores.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass

import torch
from machine import arguments, write_results

from mpinspect.demo.demo import LEARNING_RATE, Corpus, stdlib_tokens, word_loss, word_model
from mpinspect.runtime.emulation import half_arithmetic

#: FP32; below the window (1, 8); in it (128, 2^13 as recommended, 2^20 its top); beyond it.
SCALES = (None, 1.0, 8.0, 128.0, 2.0**13, 2.0**20, 2.0**26)
VALIDATION_BATCHES = 4


@dataclass
class Outcome:
    """Validation losses (mean cross-entropy, nats per token), and the number of skipped steps."""

    loss_scale: float | None
    best_validation_loss: float
    final_validation_loss: float
    skipped_steps: int


def validation_loss(model: torch.nn.Module, corpus: Corpus) -> float:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return (
            sum(word_loss(model, corpus.batch(generator)).item() for _ in range(VALIDATION_BATCHES))
            / VALIDATION_BATCHES
        )


def train_at(scale: float | None, training: Corpus, held_out: Corpus, steps: int) -> Outcome:
    """Train at one fixed scale (None: in FP32)."""
    model = word_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    best, skipped = math.inf, 0
    for step in range(steps):
        batch = training.batch(generator)
        optimizer.zero_grad()
        with contextlib.ExitStack() as half:
            if scale is not None:
                half.enter_context(half_arithmetic())
            with torch.autocast("cpu", torch.float16, enabled=scale is not None):
                loss = word_loss(model, batch)
            (loss * (scale or 1.0)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            skipped += 1
            continue
        for gradient in gradients:
            gradient /= scale or 1.0
        optimizer.step()
        if (step + 1) % 20 == 0:
            best = min(best, validation_loss(model, held_out))
    final = validation_loss(model, held_out)
    return Outcome(scale, min(best, final), final, skipped)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    training, held_out = stdlib_tokens().split()
    outcomes = []
    print(f"{'loss scale':>12} {'best':>7} {'final':>7} {'skipped':>8}   validation loss, {options.steps} steps")
    for scale in SCALES:
        outcome = train_at(scale, training, held_out, options.steps)
        outcomes.append(outcome)
        name = "FP32" if scale is None else f"2^{math.log2(scale):g}"
        print(
            f"{name:>12} {outcome.best_validation_loss:7.3f} {outcome.final_validation_loss:7.3f} {outcome.skipped_steps:8}",
            flush=True,
        )
    if options.json:
        write_results(options.json, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
