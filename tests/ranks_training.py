"""Trains a small network on several ranks, each with its own oracle of counts, for ``ranges/test_ranks_on_gloo.py``.

``train_all`` trains each model with an Inspector whose log_dir is FOLDER/MODEL/rankN/Net. After step MIDDLE, rank 0 adds up the
files on disk.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_training import NO_FSDP2, local, same, weights
from torch import nn

from mpinspect import Inspector
from mpinspect.ranges.kinds import ACTIVATION, ACTIVATION_GRADIENT, KINDS, WEIGHT_GRADIENT
from mpinspect.run.all_ranks import AllRanks

STEPS, MIDDLE = 4, 2
#: Averaged gradients are counted in steps 0, 1, 2, 4, 8, ...: this is the last of them in STEPS steps.
LAST_AVERAGED = 2
#: Exponent -> number of elements; "zeros" is one more key.
Counts = Counter[Any]


def counted(tensor: torch.Tensor) -> Counts:
    """Count the exponents of a tensor with frexp: x = m * 2^e with 0.5 <= |m| < 1."""
    _, exponents = torch.frexp(tensor.detach().double().flatten())
    is_zero = tensor.detach().flatten() == 0
    found: Counts = Counter((exponents[~is_zero] - 1).tolist())
    if zeros := int(is_zero.sum()):
        found["zeros"] = zeros
    return found


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    if name == "stages":
        return nn.Sequential(OrderedDict({f"layer{dist.get_rank()}": nn.Linear(8, 8)}))
    # 9 rows: shards of 5 and 4, or of 3, 3, 3 and 0.
    width = 12 if name == "split products" else 9
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def _shards(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def _split_products(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def _copied_shards(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, dist.get_world_size() // 2)
    return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")))


#: Each model wraps the network in its own way.
MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copies": nn.parallel.DistributedDataParallel,
    "shards": _shards,
    "copied shards": _copied_shards,
    "split products": _split_products,
    "stages": lambda stage: stage,
}


def models_of(ranks: int) -> list[str]:
    """Return the models to train. With two ranks, "copied shards" would have a single shard each."""
    return [name for name in MODELS if ranks > 2 or name != "copied shards"]


def _squares(output: torch.Tensor, target: object = None) -> torch.Tensor:
    return output.square().sum()


def _step(name: str, model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Return a function that runs a step's forwards and backwards."""
    if name != "stages":
        return lambda x: _squares(model(x)).backward()
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, last, part = dist.get_rank(), dist.get_world_size() - 1, torch.empty(2, 8, requires_grad=True)
    # Passing shapes avoids the trial run, whose meaningless gradients would reach the oracle's hooks.
    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"), input_args=(part,), output_args=(part,))
    schedule = ScheduleGPipe(stage, 2, loss_fn=_squares)
    return lambda x: schedule.step(*([] if rank else [x]), **({"target": x} if rank == last else {}))


class Oracle:
    """Counts with its own hooks, on this rank, outputs, their gradients, and parameters' gradients.

    Parameters' gradients are counted before DDP's all-reduce, for each micro-batch of a stage, and otherwise whole on rank 0.
    """

    def __init__(self, name: str, inner: nn.Module) -> None:
        self.counts: dict[tuple[str, str], Counts] = {}
        self._is_each_ranks = name in ("copies", "stages")
        for path, module in inner.named_children():
            self._look_at_outputs(path, module)
        self._parameters = [(tensor, parameter) for tensor, parameter in inner.named_parameters()]
        for tensor, parameter in self._parameters if self._is_each_ranks else ():
            parameter.register_hook(self._counter(tensor, WEIGHT_GRADIENT))

    def after_backward(self) -> None:
        for tensor, parameter in () if self._is_each_ranks else self._parameters:
            whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
            self._counter(tensor, WEIGHT_GRADIENT)(whole if dist.get_rank() == 0 else whole[:0])

    def so_far(self) -> dict[tuple[str, str], Counts]:
        return {key: Counter(counts) for key, counts in self.counts.items()}

    def _look_at_outputs(self, path: str, module: nn.Module) -> None:
        def look(module: object, args: object, output: torch.Tensor) -> None:
            self._counter(path, ACTIVATION)(output)
            output.register_hook(self._counter(path, ACTIVATION_GRADIENT))

        module.register_forward_hook(look)

    def _counter(self, tensor: str, kind: str) -> Callable[[torch.Tensor], None]:
        return lambda values: self.counts.setdefault((tensor, kind), Counter()).update(counted(local(values)))


def train(name: str, place: Path) -> dict[str, Any]:
    """Train with and without an inspector; return the counts of this rank's oracle, and whether the weights are the same.

    "averaged" counts all parameters' ``.grad`` together, after the all-reduce.
    """
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    trained = []
    for inspects in (False, True):
        inner = network(name)
        # Attached before the model is wrapped.
        log_dir = place / f"rank{rank}" / "Net"
        inspector = Inspector(inner, capture=KINDS, log_dir=log_dir).attach() if inspects else None
        model = MODELS[name](inner)
        oracle = Oracle(name, inner) if inspects else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 if name == "split products" else 1 + rank)
        step = _step(name, model)
        for number in range(STEPS):
            step(torch.randn(4, 8))
            if oracle is not None:
                oracle.after_backward()
            if name == "copies" and number == LAST_AVERAGED:
                found["averaged"] = sum((counted(weight.grad) for weight in inner.parameters()), Counter())  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
            if oracle is not None and inspector is not None and number == MIDDLE - 1:
                found["middle"] = oracle.so_far()
                _add_up_so_far(inspector, place)
        trained.append(weights(model))
        if oracle is not None and inspector is not None:
            inspector.detach()
            found["whole"] = oracle.so_far()
    return found | {"same": same(*trained)}


def exactly(name: str, place: Path) -> dict[str, Counts]:
    """Train a step on integers, whose sums are exact in any order; return one process's gradients of the whole batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Counts] = {}
    for is_whole in (False, True):
        torch.manual_seed(0)
        inner = network(name)
        inner[1] = nn.ReLU()
        for parameter in inner.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape).float()
        model = inner if is_whole else MODELS[name](inner)
        x = torch.randint(-2, 3, (4 * ranks, 8)).float()
        if is_whole:
            # Averages the ranks' gradients.
            (_squares(model(x)) / ranks).backward()
            found |= {tensor: counted(parameter.grad) for tensor, parameter in inner.named_parameters()}  # type: ignore[arg-type]
        else:
            with Inspector(inner, capture=(WEIGHT_GRADIENT,), log_dir=place / f"rank{rank}" / "Net"):
                _squares(model(x[4 * rank :][:4])).backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
    return found


def _add_up_so_far(inspector: Inspector, place: Path) -> None:
    """Let all ranks write their counts and rank 0 add them up, as it does every minute."""
    inspector.session()
    inspector._recording.flush()
    dist.barrier()
    if dist.get_rank() == 0:
        now = [0.0]
        whole = AllRanks(place, lambda: now[0])
        now[0] = 10.0
        whole.written()
        whole._background.wait()
        assert whole.notes == []
        for model in whole._models.values():
            model.close()
    dist.barrier()


def train_all(folder: Path) -> dict[str, Any]:
    """Return the results of this rank's trainings by name."""
    names = [name for name in models_of(dist.get_world_size()) if "shards" not in name or not NO_FSDP2]
    found = {name: train(name, folder / name) for name in names}
    exact = {f"exact {name}": exactly(name, folder / f"exact {name}") for name in names if name in ("copies", "shards")}
    return found | exact
