"""Lightning on scikit-learn's digits, inspected by a callback; in mixed precision with mpinspect's loss scaler.

    pip install mpinspect[examples,lightning]
    python examples/lightning_digits.py
    python examples/lightning_digits.py --precision 32-true

The report is printed at the end, and also where the training breaks. FP16 on a CPU is slow; this network is small.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import nn

import mpinspect
from mpinspect.integrations.lightning import InspectorCallback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Digits(lightning.LightningModule):
    """64 pixels -> 64 -> 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.last_loss = float("nan")

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch of images, shape (n, 64), and labels."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.last_loss = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_loader() -> torch.utils.data.DataLoader:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (%(default)s)")
    parser.add_argument("--precision", default="16-mixed", choices=("16-mixed", "32-true"), help="(%(default)s)")
    parser.add_argument("--log-dir", help="where the session file and the TensorBoard log go (nowhere)")
    options = parser.parse_args()

    # This example prints its own words only.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    plugins, scaler = [], None
    if options.precision == "16-mixed":
        # Starts so high that the first steps overflow.
        scaler = mpinspect.LossScaler(DEVICE, init_scale=2.0**22)
        plugins.append(MixedPrecision("16-mixed", DEVICE, scaler=scaler))
    callback = InspectorCallback(log_dir=options.log_dir, print_report=False)
    module = Digits()
    trainer = lightning.Trainer(
        accelerator="gpu" if DEVICE == "cuda" else "cpu",
        devices=1,
        max_steps=options.steps,
        accumulate_grad_batches=2,
        plugins=plugins,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader())

    # Without print_report=False the callback would print this to stderr.
    print(callback.report())
    print(f"last loss: {module.last_loss:.3f}")
    if scaler is not None:
        print(f"loss scale {scaler.get_scale():g}; {scaler.skipped_steps} of {scaler.steps} steps were skipped")
        for skip in scaler.skips:
            print(skip)


if __name__ == "__main__":
    main()
