"""Forks a script into the ranks of a gloo process group, each of which writes its result to a file."""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 120


def run(folder: Path, ranks: int, work: Callable[[], Any]) -> None:
    """Do the work on every rank, write its result to FOLDER/rankN.pt, and exit with the worst status."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    others: list[int] = []
    for rank in range(1, ranks):
        child = os.fork()
        if not child:
            _on_rank(rank, ranks, folder, work)
            _leave(0)
        others.append(child)
    _on_rank(0, ranks, folder, work)
    _leave(max(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others))


def _on_rank(rank: int, ranks: int, folder: Path, work: Callable[[], Any]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    torch.save(work(), folder / f"rank{rank}.pt")
    dist.barrier()


def _leave(status: int) -> None:
    """Exit without the destructors of gloo's threads, which may block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
