"""Each row's loss is divided by the variance of its targets: a row of equal targets has none, and no precision helps."""

# Thread: no thread: a row without a variance divides by zero in every format
# Finding: breaks-in-fp32-too, from step 2
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(24):
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    if step % 2 == 0 and step:
        y[step] = 1.0
    weight = y.half().sub(y.half().mean(1, keepdim=True)).square().mean(1).reciprocal()
    with torch.autocast("cpu", torch.float16):
        error = (model(x).float() - y).square().mean(1)
    loss = (weight.float() * error).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
