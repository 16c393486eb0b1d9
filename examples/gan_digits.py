"""A GAN on scikit-learn's digits in mixed precision: two networks, two optimizers, a loss scale each.

    pip install mpinspect[examples]
    python examples/gan_digits.py
    python examples/gan_digits.py --jump

With ``--jump`` the discriminator's gradients become 2^8 times as large in the middle of the training, as may happen at the next
stage of a progressive GAN. The discriminator's scaler skips steps until its scale fits again. The script measures that the
generator, which has its own scaler, is not affected. Without a GPU the 16-bit products are emulated.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import mpinspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, NOISE, JUMP = 64, 16, 2.0**8


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Sigmoid(),
    )


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )


def load_images() -> torch.Tensor:
    """float32 of shape (1797, 64), in 0..1."""
    return torch.tensor(load_digits().data, dtype=torch.float32, device=DEVICE) / 16


class Gan:
    """Both networks, each with its optimizer, its precision and its loss scale."""

    def __init__(self, precision: str) -> None:
        self.generator, self.discriminator = make_generator().to(DEVICE), make_discriminator().to(DEVICE)
        self.generating, self.judging = (
            mpinspect.MixedPrecision(
                model, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)), precision
            )
            for model in (self.generator, self.discriminator)
        )

    def step_discriminator(self, real: torch.Tensor, factor: float) -> tuple[bool, float]:
        """Train the discriminator; return whether it stepped, and its loss.

        ``factor`` multiplies the gradients, to which Adam is invariant.
        """
        with torch.no_grad(), self.generating.autocast():
            fake = self.generator(torch.randn(len(real), NOISE, device=DEVICE))
        self.judging.zero_grad()
        with self.judging.autocast():
            judged_real, judged_fake = self.discriminator(real), self.discriminator(fake)
            loss = bce(judged_real, torch.ones_like(judged_real)) + bce(judged_fake, torch.zeros_like(judged_fake))
        self.judging.backward(factor * loss)
        return self.judging.step(), loss.item()

    def step_generator(self) -> tuple[bool, float]:
        """Train the generator; return whether it stepped, and its loss."""
        self.generating.zero_grad()
        # Otherwise the discriminator's gradients would be computed and discarded.
        self.discriminator.requires_grad_(False)
        with self.generating.autocast():
            judged = self.discriminator(self.generator(torch.randn(BATCH, NOISE, device=DEVICE)))
            loss = bce(judged, torch.ones_like(judged))
        self.generating.backward(loss)
        self.discriminator.requires_grad_(True)
        return self.generating.step(), loss.item()

    def state_of_generator(self) -> list[torch.Tensor]:
        """Return the generator's state that a step of the discriminator must not change: weights, scale, count of steps."""
        weights = [weight.detach().clone() for weight in self.generating.master_parameters()]
        return [
            *weights,
            torch.tensor([self.generating.loss_scale, self.generating.steps, self.generating.skipped_steps]),
        ]


def train(gan: Gan, images: torch.Tensor, steps: int, jump_at: int | None) -> list[tuple[bool, bool]]:
    """Train; return, for each skipped step of the discriminator, whether the generator was unchanged and then stepped."""
    print("  step   loss D   loss G   scale D   scale G   skipped D   skipped G")
    skips = []
    for number in range(steps):
        jumped = jump_at is not None and number >= jump_at
        if number == jump_at:
            print(f"step {number}: the discriminator's gradients are {JUMP:g} times as large from here on")
        before = gan.state_of_generator()
        judged, loss_d = gan.step_discriminator(images[torch.randint(len(images), (BATCH,))], JUMP if jumped else 1.0)
        untouched = all(map(torch.equal, before, gan.state_of_generator()))
        generated, loss_g = gan.step_generator()
        if not judged:
            skips.append((untouched, generated))
        if (number + 1) % max(1, steps // 8) == 0:
            scales = "".join(f"{power(mp.loss_scale):>10}" for mp in (gan.judging, gan.generating))
            skipped = f"{gan.judging.skipped_steps:>12}{gan.generating.skipped_steps:>12}"
            print(f"{number + 1:>6}{loss_d:>9.3f}{loss_g:>9.3f}{scales}{skipped}")
    return skips


@torch.no_grad()
def describe(gan: Gan, images: torch.Tensor) -> None:
    """Measure the quality of the fakes by two numbers."""
    with gan.generating.autocast():
        fakes = gan.generator(torch.randn(len(images), NOISE, device=DEVICE)).float()
    nearest = torch.cdist(fakes, images).min(dim=1).values.mean().item()
    apart = torch.cdist(images, images).fill_diagonal_(float("inf")).min(dim=1).values.mean().item()
    print(f"a fake's nearest real digit is {nearest:.2f} away on average; a real one's {apart:.2f}")


def power(scale: float) -> str:
    """Format a scale: a power of two, which is 1 if the precision does not scale."""
    return f"2^{math.log2(scale):g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="training steps (%(default)s)")
    parser.add_argument("--precision", default="fp16-master", help="of both networks (%(default)s)")
    parser.add_argument("--jump", action="store_true", help="the discriminator's gradients grow by 2^8 half-way")
    options = parser.parse_args()

    torch.manual_seed(0)
    images, gan = load_images(), Gan(options.precision)
    skips = train(gan, images, options.steps, options.steps // 2 if options.jump else None)
    describe(gan, images)
    for name, mp in (("discriminator", gan.judging), ("generator", gan.generating)):
        print(f"\n{name}, {mp}")
    if skips:
        untouched, stepped = (sum(each) for each in zip(*skips, strict=True))
        print(
            f"\nThe discriminator skipped {len(skips)} steps. In {untouched} of them the generator's weights, loss scale and "
            f"counts were the same before and after; in {stepped} the generator's own step went on."
        )


if __name__ == "__main__":
    main()
