"""A GELU written out, in FP16: the cube of a large input is infinite, and the tanh of it exactly what it should be."""

# Thread: as areas_in_fp16.py, without harm
import math

import torch
from torch import nn

torch.manual_seed(0)


class Gelu(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))


model = nn.Sequential(nn.Linear(16, 64), Gelu(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
teacher = nn.Linear(16, 4)
for _ in range(40):
    x = 30 * torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        loss = (model(x) - teacher(x).detach()).float().square().mean() / 900
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
