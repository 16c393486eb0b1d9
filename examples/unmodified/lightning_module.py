"""A plain Lightning script: a LightningModule around a small network, on scikit-learn's digits.

It does not use mpinspect: `mpinspect run lightning_module.py` inspects it from outside.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn


class DigitsModule(lightning.LightningModule):
    """64 pixels -> 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of one batch of images, shape (n, 64), and labels."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        """Prints how many labels are right."""
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean().item()
        print(f"{right:.2%} of the held-out digits are right")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(images: torch.Tensor, labels: torch.Tensor, size: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="times over the training set (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where the weights go at the end")
    options = parser.parse_args()

    # Silence messages on workers, hardware and tips, so that only this script's output remains.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    module = DigitsModule()
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=options.epochs,
            accumulate_grad_batches=options.accumulate,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        trainer.fit(module, loader(images[:1500], labels[:1500], 50), loader(images[1500:], labels[1500:], 297))
    for number, loss in enumerate(module.losses[9::10], start=1):
        print(f"batch {10 * number}: loss {loss:.9f}")
    if options.save:
        torch.save(module.state_dict(), options.save)


if __name__ == "__main__":
    main()
