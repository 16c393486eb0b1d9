"""Gradients of 512 micro-batches are added up in BF16: the later ones are lost in the sum."""

# Thread: https://github.com/deepspeedai/DeepSpeed/issues/1800
# Finding: accumulation-lost
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24)).bfloat16()
optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0, momentum=0.9)
base = torch.randn(8, 24)
for step in range(3):
    optimizer.zero_grad()
    for micro_batch in range(512):
        x = (base + 0.01 * torch.randn(8, 24)).bfloat16()
        loss = (encoder(x).float() - 3.0).square().mean() / 512
        loss.backward()
    optimizer.step()
