"""Inverse frequencies of classes are cast to FP16 before they are normalised: the most frequent class has the weight zero."""

# Thread: https://github.com/facebookresearch/ParlAI/pull/2531
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
counts = torch.tensor([48_000_000.0, 4_000_000.0, 1_400_000.0])
weights = counts.reciprocal().half()
weights = (weights / weights.max()).float()
centres = torch.randn(3, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(40):
    y = torch.multinomial(counts / counts.sum(), 128, replacement=True)
    x = centres[y] + torch.randn(128, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y, weight=weights)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
