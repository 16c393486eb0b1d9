"""Gradients are clipped to a norm of 1 while they are still multiplied by the loss scale."""

# Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/9330
# Finding: unscale-missing, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(20):
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
