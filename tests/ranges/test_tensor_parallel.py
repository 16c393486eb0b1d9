"""Under tensor parallelism, outputs are AsyncCollectiveTensors, whose values are still in transfer."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import forked_ranks
import torch
from torch import nn

from mpinspect import Inspector, count_exponents
from mpinspect.ranges.kinds import KINDS
from mpinspect.ranges.windows.tensors import TensorKey

RANKS = 2
STEPS = 6
BROKEN_AT = 4


def _perceptron() -> nn.Sequential:
    return nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.Tanh(), down=nn.Linear(16, 8)))


class _Scale(nn.Module):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _model() -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(_perceptron(), _Scale(), _perceptron(), nn.Linear(8, 1))
    for part in (model[0], model[2]):
        parallelize_module(
            part, init_device_mesh("cpu", (RANKS,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return model


def _train(inspect: bool) -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"outputs": []}

    def keep(module: object, args: object, output: Any) -> None:
        found["type"] = type(output).__name__
        found["outputs"].append(output.detach().clone())

    inspector = Inspector(model, capture=KINDS)
    if inspect:
        inspector.attach()
        model[0].down.register_forward_hook(keep)
    torch.manual_seed(1)
    for step in range(STEPS):
        model[1].factor = torch.inf if step == BROKEN_AT else 1.0
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        if step != BROKEN_AT:
            optimizer.step()
    if inspect:
        inspector.detach()
    found["weights"] = [getattr(weight, "_local_tensor", weight).detach().clone() for weight in model.parameters()]
    return found | {"session": inspector.session()}


def on_each_rank(folder: Path) -> dict[str, Any]:
    # Weights and their gradients are DTensors; the outputs of "0.down" and "2.down" are AsyncCollectiveTensors.
    found, bare = _train(True), _train(False)
    session = found["session"]
    totals = session.totals()
    return {
        "type": found["type"],
        "same": all(torch.equal(*pair) for pair in zip(found["weights"], bare["weights"], strict=True)),
        "uncounted": [info.key for info in session.watched if info.key not in totals],
        "samples": sorted({window.samples for window in totals.values()}),
        "exact": totals[TensorKey("0.down", "activation")].histogram == count_exponents(torch.cat(found["outputs"])),
        "events": [(event.step, event.phase, event.module) for event in session.events],
        "notes": session.notes,
    }


def test_async_collective_outputs_are_counted_and_watched(tmp_path: Path) -> None:
    for found in forked_ranks.results(tmp_path, RANKS, on_each_rank):
        assert found["type"] == "AsyncCollectiveTensor"
        assert found["same"]
        assert found["uncounted"] == []
        assert found["exact"]
        assert found["events"][0] == (BROKEN_AT, "forward", "1")
        assert found["notes"] == ()
