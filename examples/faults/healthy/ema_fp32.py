"""The moving average of the weights is FP32; a frozen BF16 copy serves as a teacher and is never written."""

# Thread: as ema_bf16.py, done right
import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
teacher = copy.deepcopy(student).to(torch.bfloat16).requires_grad_(False)
ema = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(32, 16)
    loss = nn.functional.mse_loss(student(x), 2 * teacher(x.bfloat16()).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), student.parameters(), strict=True):
            average.lerp_(weight, 1e-4)
