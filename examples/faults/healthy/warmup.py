"""A learning rate that begins at zero, clipping of large first gradients, and a loss that falls by a factor of a
thousand."""

# Thread: as learning_rate.py, done right
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
for step in range(80):
    x = torch.randn(64, 16)
    loss = (model(x) - 30 * x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    schedule.step()
