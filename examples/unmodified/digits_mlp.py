"""A plain training script: a small MLP on scikit-learn's digits, in FP32.

It does not use mpinspect: `mpinspect run digits_mlp.py --epochs 3` inspects it from outside.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class DigitsMLP(nn.Module):
    """64 pixels -> two hidden layers -> 10 digits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, shape (n, 10), of images, shape (n, 64)."""
        return self.head(self.encoder(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="times over the training set (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="neurons of a hidden layer (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where the weights go at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    training = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    loader = torch.utils.data.DataLoader(training, batch_size=50, shuffle=True)
    model = DigitsMLP(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    for epoch in range(options.epochs):
        model.train()
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean()
        print(f"epoch {epoch + 1}: loss {loss.item():.9f}, {right.item():.2%} of the held-out digits are right")

    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
