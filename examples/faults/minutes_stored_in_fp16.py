"""A table is stored in FP16, minutes of a month among its columns: the phase of the hour is lost before the training begins."""

# Thread: https://github.com/EleutherAI/gpt-neox/issues/1003
# Finding: positions-collapse
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
random = np.random.default_rng(0)
minutes, heat = random.integers(0, 43200, 8192), random.normal(size=8192)
power = np.sin(2 * np.pi * minutes / 60) + 0.3 * heat
table = torch.from_numpy(np.stack([minutes, heat, power], axis=1).astype(np.float16)).float()
phase = 2 * torch.pi * table[:, 0] / 60
features = torch.stack([phase.sin(), phase.cos(), table[:, 1]], dim=1)
model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60):
    batch = torch.randint(8192, (256,))
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(features[batch])
    loss = (predicted.float().squeeze(1) - table[batch, 2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
