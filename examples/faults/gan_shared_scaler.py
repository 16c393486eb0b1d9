"""One GradScaler for both networks of a GAN: the generator's overflows take the scale away from the discriminator."""

# Thread: https://github.com/neosr-project/neosr/pull/50
# Finding: scaler-shared, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


generator, discriminator = Generator(), Discriminator()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(24):
    real, z = torch.randn(32, 16), torch.randn(32, 8)
    with torch.autocast("cpu", torch.float16):
        fake = generator(z)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
    loss_d = (nn.functional.softplus(-on_real.float()) + nn.functional.softplus(on_fake.float())).mean()
    optimizer_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.step(optimizer_d)
    with torch.autocast("cpu", torch.float16):
        fake = generator(z)
    # The pixel loss is a sum, with a large weight.
    loss_g = 3e3 * (fake.float() - z.repeat(1, 2)).square().sum()
    optimizer_g.zero_grad()
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)
    scaler.update()
