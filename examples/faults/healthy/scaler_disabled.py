"""A loop for either precision: with BF16 the GradScaler is made with enabled=False."""

# Thread: as bf16_with_scaler.py, done right
import torch
from torch import nn

torch.manual_seed(0)
dtype = torch.bfloat16
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
for step in range(25):
    x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
