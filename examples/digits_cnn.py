"""A convolutional network with BatchNorm on scikit-learn's digits: a healthy network that needs no loss scaling.

pip install mpinspect[examples]
python examples/digits_cnn.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import mpinspect


def make_model() -> nn.Module:
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 16, 3, padding=1, bias=False))
    model.add_module("norm1", nn.BatchNorm2d(16))
    model.add_module("relu1", nn.ReLU())
    model.add_module("conv2", nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False))
    model.add_module("norm2", nn.BatchNorm2d(32))
    model.add_module("relu2", nn.ReLU())
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(32 * 4 * 4, 10))
    return model


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 of shape (1797, 1, 8, 8) in 0..1, and their labels."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="training steps (%(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with mpinspect.Inspector(model, optimizers=optimizer) as inspector:
        for _ in range(options.steps):
            chosen = torch.randint(len(images), (64,))
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    report = inspector.report()
    print(report)
    print(f"last loss: {loss.item():.3f}")
    if report.loss_scale.recommended is not None:
        print(f"loss scaling needed: {report.loss_scale.needed}; scale: {report.loss_scale.recommended:g}")


if __name__ == "__main__":
    main()
