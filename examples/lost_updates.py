"""Why FP16 weights need FP32 masters: updates that rounding loses, first predicted, then measured.

    pip install mpinspect[examples]
    python examples/lost_updates.py

A small classifier of scikit-learn's digits trains by SGD with a small learning rate. The inspector watches the first 100 steps
in FP32 and predicts the share of updates that 16-bit weights would lose. Then complete trainings follow in FP32, in FP16 with
and without FP32 masters, and with BF16 weights. Without a GPU the 16-bit products are emulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

import mpinspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LEARNING_RATE = 64, 3e-3
#: Steps that the inspector watches.
WATCHED = 100

Batch = tuple[torch.Tensor, torch.Tensor]
#: Trains a network on a batch; returns whether its optimizer stepped.
Step = Callable[[Batch], bool]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def load_data() -> Batch:
    """Images, float32 of shape (1797, 64) in 0..1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=DEVICE) / 16
    return images, torch.tensor(digits.target, device=DEVICE)


# -- the ways to train ----------------------------------------------------------------------------------------------------


def with_mixed_precision(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> Step:
    mp = mpinspect.MixedPrecision(model, optimizer, precision)

    def step(batch: Batch) -> bool:
        images, labels = batch
        mp.zero_grad()
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        mp.backward(loss)
        return mp.step()

    return step


def with_bf16_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """BF16 weights without masters, by hand, since MixedPrecision does not offer it."""
    model.bfloat16()

    def step(batch: Batch) -> bool:
        images, labels = batch
        optimizer.zero_grad()
        with nullcontext() if DEVICE == "cuda" else mpinspect.half_arithmetic():
            loss = nn.functional.cross_entropy(model(images.bfloat16()).float(), labels)
            loss.backward()
        optimizer.step()
        return True

    return step


#: Name -> function that makes a step from a model and its optimizer.
WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Step]] = {
    "FP32": partial(with_mixed_precision, precision="fp32"),
    "FP16 weights with FP32 masters": partial(with_mixed_precision, precision="fp16-master"),
    "FP16 weights without": partial(with_mixed_precision, precision="fp16-pure"),
    "BF16 weights without": with_bf16_weights,
}


# -- measurements ---------------------------------------------------------------------------------------------------------


def predict(data: Batch, steps: int) -> None:
    """Print the inspector's prediction from the first steps of the FP32 run."""
    model, optimizer = make()
    step = with_mixed_precision(model, optimizer, "fp32")
    with mpinspect.Inspector(model, optimizers=optimizer, capture=("update",)) as inspector:
        train(step, optimizer, data, steps)
    print(f"The inspector, after {steps} steps in FP32:")
    for finding in inspector.report().findings:
        if finding.id == "updates-lost":
            print(f"  {finding.message}\n  {finding.fix}")


def train(step: Step, optimizer: torch.optim.Optimizer, data: Batch, steps: int) -> float:
    """Train on the same batches for every precision; return the share of updates that did not change their weight.

    Every 20th step is measured, on the weights that the optimizer updates: the masters, if there are any.
    """
    generator = torch.Generator().manual_seed(0)
    lost = asked = 0
    for number in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator).to(DEVICE)
        weights = optimizer.param_groups[0]["params"] if number % 20 == 0 else []
        before = [weight.detach().clone() for weight in weights]
        if step((data[0][chosen], data[1][chosen])):
            for old, weight in zip(before, weights, strict=True):
                lost += ((weight == old) & (weight.grad != 0)).sum().item()
                asked += (weight.grad != 0).sum().item()
    return lost / max(1, asked)


@torch.no_grad()
def training_loss(model: nn.Module, data: Batch) -> float:
    """Return the loss over all data, computed in FP32 from the stored weights."""
    return nn.functional.cross_entropy(model.float()(data[0]), data[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8000, help="training steps of each run (%(default)s)")
    options = parser.parse_args()
    data = load_data()
    predict(data, min(WATCHED, options.steps))

    print(f"\nMeasured over {options.steps} steps:")
    print(f"  {'':<36}{'final training loss':>20}{'against FP32':>14}{'updates lost':>14}{'seconds':>9}")
    reference = None
    for name, prepare in WAYS.items():
        start = time.perf_counter()
        model, optimizer = make()
        lost = train(prepare(model, optimizer), optimizer, data, options.steps)
        loss = training_loss(model, data)
        reference = reference or loss
        figures = f"{loss:>20.4f}{loss / reference - 1:>+14.1%}{lost:>14.1%}{time.perf_counter() - start:>9.0f}"
        print(f"  {name:<36}{figures}", flush=True)
    if DEVICE == "cpu":
        print("16-bit arithmetic is emulated on this CPU: Tensor Cores' numbers, not their speed")


if __name__ == "__main__":
    main()
