"""Gradients of four micro-batches are divided by four while they are scaled, which is linear and harmless."""

# Thread: as clip_before_unscale.py, but linear
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(12):
    optimizer.zero_grad()
    for _ in range(4):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
    for parameter in model.parameters():
        parameter.grad /= 4
    scaler.step(optimizer)
    scaler.update()
