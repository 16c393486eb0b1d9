"""A GAN in FP16 with a scaler for each network."""

# Thread: as gan_shared_scaler.py, done right
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
scaler_g, scaler_d = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
for step in range(24):
    real, z = torch.randn(32, 16), torch.randn(32, 8)
    with torch.autocast("cpu", torch.float16):
        fake = generator(z)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
    loss_d = (nn.functional.softplus(-on_real.float()) + nn.functional.softplus(on_fake.float())).mean()
    optimizer_d.zero_grad()
    scaler_d.scale(loss_d).backward()
    scaler_d.step(optimizer_d)
    scaler_d.update()
    with torch.autocast("cpu", torch.float16):
        loss_g = nn.functional.softplus(-discriminator(generator(z)).float()).mean()
    optimizer_g.zero_grad()
    scaler_g.scale(loss_g).backward()
    scaler_g.step(optimizer_g)
    scaler_g.update()
