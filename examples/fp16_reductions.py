"""Reductions that exceed FP16's range or precision, and their remedies, each measured.

    python examples/fp16_reductions.py

Sums of many numbers and sums of squares leave FP16's range (65504) or precision (11 bits) long before the numbers
themselves do. So mixed precision computes them in FP32: autocast's list of FP32 functions, ``BN_convert_float`` for
BatchNorm, the loss in FP32.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

import mpinspect
from mpinspect.training import BN_convert_float

Tensor = torch.Tensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mixed_precision(model: nn.Module) -> mpinspect.MixedPrecision:
    return mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-master")


def row(what: str, *values: object) -> None:
    print(f"{what:<44}" + "".join(f"{value:>25}" for value in values))


# -- sums -----------------------------------------------------------------------------------------------------------------


def sums(mp: mpinspect.MixedPrecision) -> None:
    ones = torch.ones(65536, device=DEVICE, dtype=torch.half)
    d = torch.full((1024,), 256.0, device=DEVICE, dtype=torch.half)
    zero = torch.zeros_like(d)
    row("", "in FP16", "in FP32", "fp16-master's autocast")
    with mp.autocast():
        sum_of_ones, loss, one_by_one = ones.sum(), nn.functional.mse_loss(d, zero), add_ones(torch.half)
    row("sum of 65,536 ones", ones.sum().item(), ones.float().sum().item(), sum_of_ones.item())
    row(
        "mean square error of differences of 256",
        nn.functional.mse_loss(d, zero).item(),
        nn.functional.mse_loss(d.float(), zero.float()).item(),
        loss.item(),
    )
    row(
        "4,096 ones added one by one",
        add_ones(torch.half).item(),
        add_ones(torch.float).item(),
        one_by_one.item(),
    )
    print("autocast picks the dtype of functions, not of a running total: keep that in FP32, as the master weights are")


def add_ones(dtype: torch.dtype) -> Tensor:
    total, one = torch.zeros((), device=DEVICE, dtype=dtype), torch.ones((), device=DEVICE, dtype=dtype)
    for _ in range(4096):
        total += one
    return total


# -- BatchNorm ------------------------------------------------------------------------------------------------------------


def batch_norms(steps: int) -> None:
    layer = nn.BatchNorm1d(8).to(DEVICE)
    layers = {
        ".half()": copy.deepcopy(layer).half(),
        "BN_convert_float": BN_convert_float(copy.deepcopy(layer).half()),
        "fp16-master": mixed_precision(copy.deepcopy(layer)).model,
    }
    torch.manual_seed(0)
    batches = [400 * torch.randn(64, 8, device=DEVICE) for _ in range(steps)]
    measured = [measure(each, copy.deepcopy(layer), batches) for each in layers.values()]
    print(f"\nBatchNorm, {steps} batches of N(0, 400^2), its input in FP16")
    row("", *layers)
    for what in measured[0]:
        row(what, *(column[what] for column in measured))


def measure(layer: nn.Module, reference: nn.Module, batches: list[Tensor]) -> dict[str, object]:
    """Compare a layer with an FP32 layer on the same inputs."""
    first_inf: int | None = None
    error = torch.zeros((), device=DEVICE)
    for step, batch in enumerate(batches, start=1):
        x = batch.half()
        error = torch.maximum(error, (layer(x).float() - reference(x.float())).abs().max())
        if first_inf is None and layer.running_var.isinf().all():
            first_inf = step
    evaluated, right = layer.eval()(x).float(), reference.eval()(x.float())
    return {
        "running variance is in": str(layer.running_var.dtype).removeprefix("torch."),
        "running variance, largest": f"{layer.running_var.max().item():.6g}",
        "all of it infinite after": "never" if first_inf is None else f"{first_inf} steps",
        "training output, largest error": f"{error.item():.2g}",
        "evaluation output, largest error": f"{(evaluated - right).abs().max().item():.2g}",
        "evaluation output, exact zeros": f"{(evaluated == 0).double().mean().item():.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="batches that BatchNorm sees (%(default)s)")
    options = parser.parse_args()

    mp = mixed_precision(nn.Linear(8, 8).to(DEVICE))
    if mp.emulated:
        print("16-bit arithmetic is emulated on this CPU: Tensor Cores' numbers, not their speed")
    sums(mp)
    batch_norms(options.steps)


if __name__ == "__main__":
    main()
