"""A plain mixed-precision loop: CPU autocast in FP16, a GradScaler, clipping, and gradients accumulated over micro-batches.

It does not use mpinspect: `mpinspect run accumulation_scaler.py` inspects it from outside. The scale starts so high that the
first steps overflow and are skipped. The network is tiny because FP16 products are slow on a CPU.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

MICRO_BATCHES = 4


class Digits(nn.Module):
    """64 pixels -> 32 -> 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, shape (n, 10), of images, shape (n, 64)."""
        return self.output(torch.tanh(self.hidden(images)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--init-scale", type=float, default=2.0**24, help="loss scale at the start (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where weights and scale go at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.init_scale, growth_interval=8)

    for step in range(options.steps):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            chosen = torch.randint(len(images), (16,))
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen]) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {total:.9f}, scale {scaler.get_scale():g}")

    if options.save:
        torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, options.save)


if __name__ == "__main__":
    main()
