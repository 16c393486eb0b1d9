"""A loss is weighted by the ratio of two gradients' norms; autograd.grad gets unscaled losses, and FP16 flushes one gradient."""

# Thread: https://github.com/CompVis/latent-diffusion/issues/176
# Finding: asked-gradients-flushed in 2, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24))
judge = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 1)).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
weight = model[2].weight
for step in range(20):
    x = torch.randn(64, 24)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
        verdict = judge(y)
    distance = (y.float() - x).abs().mean()
    verdict = verdict.float().mean() * 2e-5
    (of_distance,) = torch.autograd.grad(distance, weight, retain_graph=True)
    (of_verdict,) = torch.autograd.grad(verdict, weight, retain_graph=True)
    loss = distance + verdict * (of_distance.norm() / (of_verdict.norm() + 1e-8)).clamp(max=10)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
