"""A plain GAN on scikit-learn's digits: two networks and two optimizers that alternate.

It does not use mpinspect: `mpinspect run gan.py` inspects it from outside.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

BATCH, NOISE = 64, 16


class Generator(nn.Module):
    """Noise -> 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.pixels = nn.Linear(64, 64)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Images, shape (n, 64) in 0..1, of noise, shape (n, NOISE)."""
        return torch.sigmoid(self.pixels(self.body(noise)))


class Discriminator(nn.Module):
    """64 pixels -> real or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.verdict = nn.Linear(64, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, shape (n, 1), of images, shape (n, 64)."""
        return self.verdict(self.body(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="turns of each network (%(default)s)")
    parser.add_argument("--save", metavar="PATH", help="where both networks' weights go at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    generator, discriminator = Generator(), Discriminator()
    generating = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judging = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    for step in range(options.steps):
        real = images[torch.randint(len(images), (BATCH,))]
        fake = generator(torch.randn(BATCH, NOISE))
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        judging.zero_grad()
        loss_d.backward()
        judging.step()

        loss_g = bce(discriminator(fake), ones)
        generating.zero_grad()
        loss_g.backward()
        generating.step()
        if (step + 1) % 20 == 0:
            print(
                f"step {step + 1}: loss of the discriminator {loss_d.item():.9f}, of the generator {loss_g.item():.9f}"
            )

    if options.save:
        torch.save({"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, options.save)


if __name__ == "__main__":
    main()
