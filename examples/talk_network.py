"""The simple network of NVIDIA's GTC 2018 talk on mixed precision in PyTorch, inspected; then its FP16 loop.

    python examples/talk_network.py

First the plain FP32 loop, with the inspector attached in two lines. Then the talk's mixed-precision loop: an FP16 model, FP32
master weights managed by hand, and a loss multiplied by 128. Both reports show unscaled gradients, so their ranges are equal.
Without a GPU the FP16 products are emulated.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch

import mpinspect
from mpinspect.runtime.emulation import half_arithmetic

N, D_in, D_out = 64, 1024, 512
scale_factor = 128.0


def train_fp32(steps: int, device: str) -> mpinspect.Inspector:
    x, y, model = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    with mpinspect.Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(steps):
            y_pred = model(x)
            loss = torch.nn.functional.mse_loss(y_pred, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return inspector


def train_fp16_with_masters(steps: int, device: str) -> mpinspect.Inspector:
    x, y, model = make(device)
    x, y, model = x.half(), y.half(), model.half()
    # FP32 master weights: the optimizer steps these, the model gets an FP16 copy after each step.
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)

    # The inspector can't detect a scale applied by hand, nor an optimizer of other weights than the model's.
    with mpinspect.Inspector(model, optimizers=optimizer, loss_scale=scale_factor) as inspector:
        for _ in range(steps):
            y_pred = model(x)
            # The loss is summed in FP32: FP16 sums overflow early.
            loss = torch.nn.functional.mse_loss(y_pred.float(), y.float())
            model.zero_grad()
            (scale_factor * loss).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float() / scale_factor
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    return inspector


def make(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """The same data and weights for both loops."""
    torch.manual_seed(0)
    x, y = torch.randn(N, D_in, device=device), torch.randn(N, D_out, device=device)
    return x, y, torch.nn.Linear(D_in, D_out).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps of each loop (%(default)s)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    print("--- FP32 ---")
    print(train_fp32(options.steps, device).report())
    print(f"--- FP16 with FP32 master weights, loss scale {scale_factor:g} ---")
    with nullcontext() if device == "cuda" else half_arithmetic():
        inspector = train_fp16_with_masters(options.steps, device)
    print(inspector.report())


if __name__ == "__main__":
    main()
