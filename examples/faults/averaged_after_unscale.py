"""Replicas average their gradients after ``scaler.unscale_``: one overflows and skips, the other steps on its infinities."""

# Thread: no thread: GradScaler looks for infinities when it unscales, in the gradients of its own optimizer alone
# Finding: gradients-broken-after-check, from step 20
import copy

import torch
from torch import nn

torch.manual_seed(0)
left = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
right = copy.deepcopy(left)
replicas = [
    (model, torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**10))
    for model in (left, right)
]
teacher = nn.Linear(16, 4)
for step in range(40):
    for model, optimizer, scaler in replicas:
        x = torch.randn(64, 16)
        if step == 20 and model is right:
            x[0] *= 300
        with torch.autocast("cpu", torch.float16):
            loss = (model(x) - teacher(x).detach()).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    with torch.no_grad():
        for one, other in zip(left.parameters(), right.parameters(), strict=True):
            mean = (one.grad + other.grad) / 2
            one.grad.copy_(mean)
            other.grad.copy_(mean)
    for _, optimizer, scaler in replicas:
        scaler.step(optimizer)
        scaler.update()
