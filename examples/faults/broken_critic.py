"""A bare step of the discriminator's optimizer breaks its weights, and with them the generator's loss."""

# Thread: https://github.com/IAHispano/Applio/pull/860 (optim_d.step() after scaler.step(optim_d), NaNs in both losses)
# Finding: weights-broken-elsewhere, from step 0
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
discriminator = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optim_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optim_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

for step in range(20):
    real = torch.randn(64, 12).cumsum(1)
    with torch.autocast("cpu", torch.float16):
        fake = generator(torch.randn(64, 8))
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
    loss_d = (on_real.float() - 1).square().mean() + on_fake.float().square().mean()
    optim_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.step(optim_d)
    optim_d.step()
    with torch.autocast("cpu", torch.float16):
        scores = discriminator(fake)
    loss_g = (scores.float() - 1).square().mean()
    optim_g.zero_grad()
    scaler.scale(loss_g).backward()
    scaler.step(optim_g)
    scaler.update()
    print(f"step {step}: discriminator {loss_d.item():.4f}, generator {loss_g.item():.4f}")
