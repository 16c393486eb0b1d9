"""An Accelerate loop on scikit-learn's digits with mpinspect's loss scaler, and an Inspector on the model.

    pip install mpinspect[examples,accelerate]
    python examples/accelerate_loop.py

On a GPU it trains in FP16. Without one Accelerate knows no FP16: the arithmetic stays FP32, and the loss scale is shown at
work all the same.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

import mpinspect

ON_GPU = torch.cuda.is_available()


def make_model() -> nn.Module:
    model = nn.Sequential()
    model.add_module("hidden", nn.Linear(64, 64))
    model.add_module("relu", nn.ReLU())
    model.add_module("head", nn.Linear(64, 10))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (%(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16" if ON_GPU else "no", cpu=not ON_GPU, gradient_accumulation_steps=2)
    # Before prepare(), which passes it to the optimizer.
    scaler = accelerator.scaler = mpinspect.LossScaler(accelerator.device.type)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared, stepper, loader = accelerator.prepare(model, optimizer, loader)

    # The model and the optimizer as they were before prepare(): names and steps are theirs.
    with mpinspect.Inspector(model, optimizers=optimizer, scalers=scaler) as inspector:
        steps = 0
        while steps < options.steps:
            for batch, targets in loader:
                with accelerator.accumulate(prepared):
                    loss = nn.functional.cross_entropy(prepared(batch), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                    stepper.step()
                    stepper.zero_grad()
                steps += accelerator.sync_gradients
                if steps >= options.steps:
                    break

    print(inspector.report())
    print(f"last loss: {loss.item():.3f}")
    print(f"loss scale {scaler.get_scale():g}; {scaler.skipped_steps} of {scaler.steps} steps were skipped")


if __name__ == "__main__":
    main()
