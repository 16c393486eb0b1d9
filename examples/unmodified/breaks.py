"""A plain loop that breaks: at a known step the gradient of one module becomes infinite, and then the weights.

It does not use mpinspect: `mpinspect run breaks.py` names the step and the module. `blocks.1` takes the root of a weight that
becomes zero: its forward stays finite, the gradient of the root does not. With `--raise` the loop raises an exception at the
first loss that is not finite.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn


class Block(nn.Module):
    """Adds the output of a small network, scaled by the root of a weight, to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, width) in and out."""
        return x + torch.tanh(self.linear(x)) * self.gate.sqrt()


class Network(nn.Module):
    """Three blocks and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row of x."""
        return self.head(self.blocks(x))[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--at", type=int, default=12, help="the step, from 0, at which it breaks (%(default)s)")
    parser.add_argument("--raise", action="store_true", dest="raises", help="stop at the first loss that is not finite")
    parser.add_argument("--save", metavar="PATH", help="where the weights go at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Network(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(options.steps):
        x = torch.randn(32, 16)
        if step == options.at:
            with torch.no_grad():
                model.blocks[1].gate.zero_()
        loss = (model(x) - x.sum(dim=1)).square().mean()
        print(f"step {step}: loss {loss.item():.9f}")
        if options.raises and not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
