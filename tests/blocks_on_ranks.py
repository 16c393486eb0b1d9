"""Counts blocks of shards on several ranks, for ``counting/test_blocks_on_ranks.py``.

``python blocks_on_ranks.py FOLDER RANKS`` forks into RANKS ranks; each shards the same matrices, and writes its counts by case
to FOLDER/rankN.pt.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpinspect import count_blocks

LIMIT_S = 120
#: Rows that 32 and the ranks divide, and rows that they do not.
ROWS = (256, 150)
COLUMNS = 96


def matrix(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randint(-24, 1, (rows, COLUMNS), generator=generator)
    return torch.randn(rows, COLUMNS, generator=generator) * torch.exp2(spread)


def _on_rank(rank: int, ranks: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for rows in ROWS:
        for dim in (0, 1):
            shard = distribute_tensor(matrix(rows), mesh, [Shard(dim)])
            found[rows, dim, "1x32"] = count_blocks(shard)
            found[rows, dim, "32x1"] = count_blocks(shard.T)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()


def main(folder: Path, ranks: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    others: list[int] = []
    for rank in range(1, ranks):
        child = os.fork()
        if not child:
            _on_rank(rank, ranks, folder)
            _leave(0)
        others.append(child)
    _on_rank(0, ranks, folder)
    _leave(max(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others))


def _leave(status: int) -> None:
    """Exit without the destructors of gloo's threads, which may block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
