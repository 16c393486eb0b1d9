"""A plain data-parallel script: DistributedDataParallel over gloo, on CPUs.

    torchrun --nproc-per-node 2 ddp.py

It does not use mpinspect: `torchrun --nproc-per-node 2 --no-python mpinspect run ddp.py` inspects it from outside.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where rank 0 writes the weights at the end")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    own = torch.Generator().manual_seed(1 + dist.get_rank())

    for step in range(options.steps):
        x = torch.randn(16, 32, generator=own)
        loss = (model(x)[:, 0] - x.sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if (step + 1) % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.9f}")

    if options.save and dist.get_rank() == 0:
        torch.save(network.state_dict(), options.save)
    # Wait for all ranks: exiting while gloo is still busy may abort the process.
    dist.barrier()
    # DistributedDataParallel must not be the group's last owner: torch 2.13 joins gloo's threads in its destructor while it
    # holds the GIL, and a thread that still frees a tensor waits for the GIL.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
