"""Calls a function on every rank of a gloo process group, in processes of their own.

``python forked_ranks.py FOLDER RANKS FILE FUNCTION MODULE...`` imports the modules and forks into the ranks. Each rank
calls the file's function with FOLDER, and saves the result as FOLDER/rankN.pt.
"""

import faulthandler
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm

#: Seconds after which a hanging rank is terminated.
LIMIT_S = 120


def results(folder: Path, ranks: int, work: Callable[[Path], Any], modules: Sequence[str] = ()) -> list[Any]:
    """Call ``work(folder)`` on every rank; return each rank's result.

    Args:
        work: function of a module, which every rank imports.
        modules: to import once, before the ranks are forked.
    """
    words = [__file__, folder, ranks, inspect.getfile(work), work.__name__, *modules]
    status, out, err = warm.run(folder, [str(word) for word in words])
    assert status == 0, out + err
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def main(folder: Path, ranks: int, file: Path, function: str, *modules: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, str(file.parent))
    for module in modules:
        importlib.import_module(module)
    work = getattr(importlib.import_module(file.stem), function)
    others: list[int] = []
    for rank in range(1, ranks):
        child = os.fork()
        if not child:
            _on_rank(rank, ranks, folder, work)
            _leave(0)
        others.append(child)
    _on_rank(0, ranks, folder, work)
    _leave(max(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others))


def _on_rank(rank: int, ranks: int, folder: Path, work: Callable[[Path], Any]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    torch.save(work(folder), folder / f"rank{rank}.pt")
    # Unless the work has destroyed the group.
    if dist.is_initialized():
        dist.barrier()


def _leave(status: int) -> None:
    """Exit without the destructors of gloo's threads, which may block or call std::terminate."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
