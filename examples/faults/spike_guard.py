"""A guard skips the step of an outlier before the gradients are zeroed: they add up, and exceed its limit ever after."""

# Thread: https://github.com/MeryylleA/lunariscodex/pull/71
# Finding: steps-stopped, from step 12
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weights = torch.randn(12)
for step in range(60):
    x = torch.randn(64, 12)
    y = torch.sin(x @ weights)
    if step == 12:
        y[5] = 9000.0
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float().squeeze(-1) - y).square().mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    if norm > 25:
        continue
    optimizer.step()
    optimizer.zero_grad()
