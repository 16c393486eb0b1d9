"""A gradient penalty takes gradients of the scaled output and never divides them: it asks for a norm of 1 / 4,096."""

# Thread: https://github.com/NVIDIA/apex/issues/654
# Finding: scaled-plus-unscaled, from step 1
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(30):
    real, fake = torch.randn(64, 16) + 1, torch.randn(64, 16)
    share = torch.rand(64, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        distance = critic(fake).float().mean() - critic(real).float().mean()
        score = critic(between)
    (gradient,) = torch.autograd.grad(scaler.scale(score.float().sum()), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    scaler.scale(distance + 10 * penalty).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
