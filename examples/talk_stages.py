"""The simple network of NVIDIA's GTC 2018 talk on mixed precision in PyTorch, from FP32 to mixed precision in stages.

    python examples/talk_stages.py

Every stage is one function, and differs from the previous one in a line or two. The printed tables measure the effect of each
stage. Without a GPU the FP16 products are emulated.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.functional import linear, mse_loss

import mpinspect
from mpinspect.training import (
    BN_convert_float,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)

N, D_in, D_out = 64, 1024, 512
scale_factor = 128.0

Tensor = torch.Tensor
#: The losses as the loop saw them, and the weights that the optimizer stepped.
Trained = tuple[list[Tensor], list[Tensor]]
Stage = Callable[[torch.nn.Module, Tensor, Tensor, int, float], Trained]


# -- the stages -----------------------------------------------------------------------------------------------------------


def stage_0(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """FP32."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def stage_1(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """Everything in half precision."""
    model, x, y = model.half(), x.half(), y.half()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def stage_2(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """... with FP32 master weights."""
    model_params, master_params = prep_param_lists(model)  # before .half(), so that the masters start unrounded
    model, x, y = model.half(), x.half(), y.half()
    optimizer = torch.optim.SGD(master_params, lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        model_grads_to_master_grads(model_params, master_params)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        losses.append(loss.detach())
    return losses, master_params


def stage_3(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """... and a static loss scale."""
    model_params, master_params = prep_param_lists(model)
    model, x, y = model.half(), x.half(), y.half()
    optimizer = torch.optim.SGD(master_params, lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x), y)
        model.zero_grad()
        (scale_factor * loss).backward()
        model_grads_to_master_grads(model_params, master_params)
        for master in master_params:
            master.grad /= scale_factor
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        losses.append(loss.detach())
    return losses, master_params


def stage_4(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """... and the loss in FP32."""
    model_params, master_params = prep_param_lists(model)
    model, x = model.half(), x.half()
    optimizer = torch.optim.SGD(master_params, lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x).float(), y)
        model.zero_grad()
        (scale_factor * loss).backward()
        model_grads_to_master_grads(model_params, master_params)
        for master in master_params:
            master.grad /= scale_factor
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        losses.append(loss.detach())
    return losses, master_params


def stage_5(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """... and BatchNorm in FP32."""
    model_params, master_params = prep_param_lists(model)
    model, x = BN_convert_float(model.half()), x.half()
    optimizer = torch.optim.SGD(master_params, lr)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(x).float(), y)
        model.zero_grad()
        (scale_factor * loss).backward()
        model_grads_to_master_grads(model_params, master_params)
        for master in master_params:
            master.grad /= scale_factor
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        losses.append(loss.detach())
    return losses, master_params


def stage_6(model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    """The same by MixedPrecision."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    mp = mpinspect.MixedPrecision(model, optimizer, "fp16-master", scale_factor)
    losses = []
    for _ in range(steps):
        with mp.autocast():
            loss = mse_loss(model(x), y)
        mp.zero_grad()
        mp.backward(loss)
        mp.step()
        losses.append(loss.detach())
    return losses, mp.master_parameters()


# -- the measuring --------------------------------------------------------------------------------------------------------


def simple_network(steps: int, device: str) -> None:
    """Stages 0 to 4 on the talk's network."""
    torch.manual_seed(0)
    x, y = torch.randn(N, D_in, device=device), torch.randn(N, D_out, device=device)
    network = torch.nn.Linear(D_in, D_out).to(device)
    first = network.weight.detach().clone()
    rows = []
    for stage in (stage_0, stage_1, stage_2, stage_3, stage_4):
        model, gradients = copy.deepcopy(network), []
        model.register_forward_hook(keep_gradient(gradients))
        losses, (weight, bias) = train(stage, model, x, y, steps, 1e-3)
        if stage is stage_0:
            goal = weight
        row = {
            "final loss": f"{mse_loss(linear(x.double(), weight.double(), bias.double()), y.double()).item():.6f}",
            "weights moved": f"{(weight != first.to(weight.dtype)).double().mean().item():.1%}",
            "off FP32's way": f"{((weight - goal).norm() / (goal - first).norm()).item():.3%}",
            "subnormal gradients": f"{is_subnormal(gradients[0]).double().mean().item():.1%}",
            "losses told apart": f"{len({loss.item() for loss in losses})}",
            "largest loss scale": f"2^{math.floor(math.log2(torch.finfo(losses[0].dtype).max / losses[0].item()))}",
        }
        rows.append(row)
        show(stage, row, header=stage is stage_0)
    cured("1 -> 2, FP32 master weights", rows[1], rows[2], "weights moved", "off FP32's way", "final loss")
    cured(f"2 -> 3, loss scale {scale_factor:g}", rows[2], rows[3], "subnormal gradients", "off FP32's way")
    cured("3 -> 4, loss in FP32", rows[3], rows[4], "losses told apart", "largest loss scale", "off FP32's way")


def network_with_batch_norm(steps: int, device: str) -> None:
    """Stages 4 to 6 with a BatchNorm, and inputs so large that the variance of its input exceeds FP16."""
    torch.manual_seed(0)
    x, y = 1024 * torch.randn(N, D_in, device=device), torch.randn(N, D_out, device=device)
    network = torch.nn.Sequential(torch.nn.Linear(D_in, D_out), torch.nn.BatchNorm1d(D_out)).to(device)
    rows, trained = [], []
    for stage in (stage_0, stage_4, stage_5, stage_6):
        model = copy.deepcopy(network)
        # At 1e-3 this network hardly changes in 500 steps: BatchNorm makes the gradients independent of the inputs' scale.
        losses, weights = train(stage, model, x, y, steps, 1.0)
        row = {
            "last loss in training": f"{losses[-1].item():.5f}",
            "loss in evaluation": f"{evaluate(model, x, y):.5f}",
            "largest running variance": f"{model[1].running_var.max().item():.4g}",
        }
        rows.append(row)
        trained.append(weights)
        show(stage, row, header=stage is stage_0)
    cured("4 -> 5, BN_convert_float", rows[1], rows[2], "largest running variance", "loss in evaluation")
    same = all(torch.equal(one, other) for one, other in zip(*trained[-2:], strict=True))
    print(f"5 -> 6, MixedPrecision: the same weights bit for bit: {same}")


def train(stage: Stage, model: torch.nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> Trained:
    with nullcontext() if x.is_cuda else mpinspect.half_arithmetic():
        losses, weights = stage(model, x, y, steps, lr)
    return losses, [weight.detach() for weight in weights]


def keep_gradient(kept: list[Tensor]) -> Callable[..., None]:
    """A forward hook that puts the gradient of the output into a list."""

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...], y_pred: Tensor) -> None:
        y_pred.register_hook(lambda gradient: kept.append(gradient.detach()))

    return hook


def is_subnormal(gradient: Tensor) -> Tensor:
    """Return where a value is subnormal or zero in its dtype."""
    return gradient.abs() < torch.finfo(gradient.dtype).smallest_normal


@torch.no_grad()
def evaluate(model: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return mse_loss(model.float()(x), y).item()


def show(stage: Stage, row: dict[str, str], *, header: bool) -> None:
    if header:
        print(f"\n{'stage':<42}" + "  ".join(row))
    name = f"{stage.__name__[-1]}  {stage.__doc__.rstrip('.')}"
    print(f"{name:<42}" + "  ".join(value.rjust(len(key)) for key, value in row.items()))


def cured(change: str, before: dict[str, str], after: dict[str, str], *columns: str) -> None:
    print(f"{change}: " + "; ".join(f"{column} {before[column]} -> {after[column]}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps of each stage (%(default)s)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("16-bit arithmetic is emulated on this CPU: Tensor Cores' numbers, not their speed")

    simple_network(options.steps, device)
    network_with_batch_norm(options.steps, device)


if __name__ == "__main__":
    main()
