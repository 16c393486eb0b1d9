"""Gradients of 64 micro-batches are added up in FP32, computed in BF16."""

# Thread: as bf16_accumulation.py, done right
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
for step in range(6):
    optimizer.zero_grad()
    for micro_batch in range(64):
        x = torch.randn(8, 24)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (encoder(x).float() - 3.0).square().mean() / 64
        loss.backward()
    optimizer.step()
