"""Counts blocks of shards on several ranks, for ``counting/test_blocks_on_ranks.py``.

``python blocks_on_ranks.py FOLDER RANKS`` forks into RANKS ranks; each shards the same matrices, and writes its counts by case
to FOLDER/rankN.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import forked_ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpinspect import count_blocks
from mpinspect.numeric.blocks import BlockCounts

#: Rows that 32 and the ranks divide, and rows that they do not.
ROWS = (256, 150)
COLUMNS = 96


def matrix(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randint(-24, 1, (rows, COLUMNS), generator=generator)
    return torch.randn(rows, COLUMNS, generator=generator) * torch.exp2(spread)


def count() -> dict[tuple[int, int, str], BlockCounts]:
    """Return the counts of this rank's shards by rows, sharded dimension and block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for rows in ROWS:
        for dim in (0, 1):
            shard = distribute_tensor(matrix(rows), mesh, [Shard(dim)])
            found[rows, dim, "1x32"] = count_blocks(shard)
            found[rows, dim, "32x1"] = count_blocks(shard.T)
    return found


if __name__ == "__main__":
    forked_ranks.run(Path(sys.argv[1]), int(sys.argv[2]), count)
