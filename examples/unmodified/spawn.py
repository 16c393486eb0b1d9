"""A plain script that starts its own training processes: torch.multiprocessing.spawn, gloo, gradients averaged by hand.

It does not use mpinspect: `mpinspect run spawn.py` inspects it and its processes from outside.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Regressor(nn.Module):
    """32 numbers -> 1."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(32, 64)
        self.output = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row of x, shape (n, 32)."""
        return self.output(torch.relu(self.hidden(x)))[:, 0]


def train(rank: int, processes: int, meeting: str, steps: int, save: str | None) -> None:
    """Train in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    own = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        x = torch.randn(16, 32, generator=own)
        loss = (model(x) - x.sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= processes
        optimizer.step()
        if (step + 1) % 10 == 0 and rank == 0:
            print(f"step {step + 1}: loss {loss.item():.9f}", flush=True)
    if save and rank == 0:
        torch.save(model.state_dict(), save)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes to train in (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where the first process writes the weights at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        meeting = str(Path(directory) / "meeting")
        torch.multiprocessing.spawn(
            train, (options.processes, meeting, options.steps, options.save), nprocs=options.processes
        )
    print("all processes are done")


if __name__ == "__main__":
    main()
