"""Two gloo processes under DDP, FSDP2 and tensor parallelism: the ranks' sessions add up to what an oracle counts."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mpinspect import Inspector, Session
from mpinspect.numeric.exponents import ExponentHistogram
from mpinspect.ranges.analysis.ranks import merge_ranks
from mpinspect.ranges.kinds import UPDATE, WEIGHT, WEIGHT_GRADIENT
from mpinspect.ranges.session import TensorKey

RANKS, STEPS = 2, 4
#: Exponent -> elements; "zeros" beside.
Counts = Counter[Any]


def _counted(tensor: torch.Tensor) -> Counts:
    """The exponents of a tensor, by frexp: x = m * 2^e with 0.5 <= |m| < 1."""
    _, exponents = torch.frexp(tensor.detach().double().flatten())
    is_zero = tensor.detach().flatten() == 0
    found: Counts = Counter((exponents[~is_zero] - 1).tolist())
    if zeros := int(is_zero.sum()):
        found["zeros"] = zeros
    return found


def _as_counter(histogram: ExponentHistogram) -> Counts:
    found: Counts = Counter({histogram.min_exponent + i: int(n) for i, n in enumerate(histogram.counts) if n})
    if histogram.zeros:
        found["zeros"] = histogram.zeros
    return found


def _network(width: int = 9) -> nn.Sequential:
    torch.manual_seed(0)
    # 9 rows: shards of 5 and 4.
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def _copies() -> tuple[nn.Module, bool]:
    return nn.parallel.DistributedDataParallel(_network()), False


def _shards() -> tuple[nn.Module, bool]:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_network()), False


def _split_products() -> tuple[nn.Module, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(_network(10), init_device_mesh("cpu", (RANKS,)), plan), True


MODELS: dict[str, Callable[[], tuple[nn.Module, bool]]] = {
    "copies": _copies,
    "shards": _shards,
    "split products": _split_products,
}


def _names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name.removeprefix("module."), parameter) for name, parameter in model.named_parameters())


def _train(model: nn.Module, same_batch: bool, log_dir: Path) -> dict[str, Counts]:
    """Train and return what this rank's own hooks counted: before the all-reduce of DDP, else whole gradients on rank 0."""
    rank = dist.get_rank()
    own: dict[str, Counts] = {name: Counter() for name, _ in _names(model)}
    is_copy = isinstance(model, nn.parallel.DistributedDataParallel)

    def counter(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: own[name].update(_counted(gradient))

    if is_copy:
        for name, parameter in _names(model):
            parameter.register_hook(counter(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 if same_batch else 1 + rank)
    with Inspector(model, optimizers=optimizer, capture=(WEIGHT_GRADIENT, WEIGHT, UPDATE), log_dir=log_dir):
        for _ in range(STEPS):
            model(torch.randn(4, 8)).square().sum().backward()
            if not is_copy:
                for name, parameter in _names(model):
                    whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
                    own[name].update(_counted(whole) if rank == 0 else Counter())
            optimizer.step()
            optimizer.zero_grad()
    return own


def _on_one_rank(rank: int, directory: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    found = {name: _train(*make(), Path(directory, name, f"rank{rank}", "Net")) for name, make in MODELS.items()}
    torch.save(found, Path(directory) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # As in test_training_distributed.py.
    os._exit(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    import warm

    status, out, err = warm.run(directory, [__file__, str(directory)])
    assert status == 0, out + err
    return directory


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_what_an_oracle_counts(name: str, trained: Path) -> None:
    merged = merge_ranks(Session.load(trained / name / f"rank{rank}" / "Net") for rank in range(RANKS))
    oracle: dict[str, Counts] = {}
    for rank in range(RANKS):
        for tensor, counts in torch.load(trained / f"rank{rank}.pt", weights_only=False)[name].items():
            oracle.setdefault(tensor, Counter()).update(counts)
    totals = merged.totals()
    for tensor, counts in oracle.items():
        assert counts.total()
        assert _as_counter(totals[TensorKey(tensor, WEIGHT_GRADIENT)].histogram) == counts, tensor
    # Every element of the weights is there once, on however many ranks: as many in each step.
    shapes = {info.name: info.shape for info in merged.watched if info.kind == WEIGHT}
    for tensor, shape in shapes.items():
        weight = totals[TensorKey(tensor, WEIGHT)]
        assert weight.histogram.total == STEPS * torch.Size(shape).numel()
        assert weight.samples == totals[TensorKey(tensor, UPDATE)].samples == STEPS
    held = {info.name: info.held for info in merged.watched if info.kind == WEIGHT_GRADIENT}
    if name == "split products":
        assert held == {"0.weight": "shard", "0.bias": "shard", "2.weight": "shard", "2.bias": "replica"}
    else:
        assert set(held.values()) == {"own" if name == "copies" else "shard"}
    assert [(rank.info.rank, rank.info.world_size) for rank in merged.ranks] == [(0, RANKS), (1, RANKS)]
    assert merged.progress.steps == merged.progress.sampled_steps == STEPS
    assert merged.precision.reduced == (() if name == "split products" else ("float32",))


if __name__ == "__main__":
    torch.multiprocessing.start_processes(_on_one_rank, (sys.argv[1],), nprocs=RANKS, start_method="fork")
