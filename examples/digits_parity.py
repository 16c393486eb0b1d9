"""Does mixed precision cost accuracy? A convolutional network on scikit-learn's digits, in every precision, several seeds.

    pip install mpinspect[examples]
    python examples/digits_parity.py

The table follows NVIDIA's GTC 2018 talk on mixed precision in PyTorch: test accuracy in FP32 next to the accuracy in mixed
precision. Seeds draw weights and batches; half of the images are held out, the same half for all, so the accuracy has
room to differ. A difference within FP32's standard deviation over the seeds is not significant. Without a GPU the 16-bit
products are emulated.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import mpinspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ("fp32", "fp16-amp", "fp16-master", "bf16-amp", "bf16-master")
BATCH = 64

Data = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data() -> tuple[Data, Data]:
    """For training and for testing: images, float32 of shape (n, 1, 8, 8) in 0..1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=DEVICE)[:, None] / 16
    labels = torch.tensor(digits.target, device=DEVICE)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    half = len(order) // 2
    return (images[order[:half]], labels[order[:half]]), (images[order[half:]], labels[order[half:]])


def train(precision: str, seed: int, epochs: int, data: Data) -> mpinspect.MixedPrecision:
    torch.manual_seed(seed)
    images, labels = data
    model = make_model().to(DEVICE)
    mp = mpinspect.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), precision)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).to(DEVICE).split(BATCH):
            mp.zero_grad()
            with mp.autocast():
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            mp.backward(loss)
            mp.step()
    return mp


@torch.no_grad()
def accuracy(mp: mpinspect.MixedPrecision, data: Data) -> float:
    """Per cent, in the precision that the model was trained in."""
    mp.model.eval()
    with mp.autocast():
        found = mp.model(data[0]).argmax(dim=1)
    return 100 * (found == data[1]).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each precision, 2 or more (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of each run (%(default)s)")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("a standard deviation needs two seeds or more")

    training, testing = load_data()
    print(f"{'':<12}{'accuracy':>10}{'st. dev.':>10}{'difference':>12}{'in st. devs.':>14}{'skipped':>9}{'seconds':>9}")
    reference: tuple[float, float] | None = None
    for precision in PRECISIONS:
        start = time.perf_counter()
        runs = [train(precision, seed, options.epochs, training) for seed in range(options.seeds)]
        accuracies = [accuracy(mp, testing) for mp in runs]
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        reference = reference or (mean, deviation)
        difference = mean - reference[0]
        relative = f"{difference / reference[1]:+.2f}" if reference[1] else "undefined"
        skipped = sum(mp.skipped_steps for mp in runs)
        figures = f"{mean:>9.2f}%{deviation:>10.2f}{difference:>+12.2f}{relative:>14}{skipped:>9}"
        print(f"{precision:<12}{figures}{time.perf_counter() - start:>9.0f}", flush=True)
    if runs[0].emulated:
        print("16-bit arithmetic is emulated on this CPU: Tensor Cores' numbers, not their speed")


if __name__ == "__main__":
    main()
