"""Pairs of a metric loss that are one and the same image: the root of their distance has no finite gradient at any loss scale."""

# Thread: https://github.com/huggingface/sentence-transformers/pull/4033
# Finding: argument-out-of-range, from step 6
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
classes = torch.randn(16, 12)
for step in range(24):
    label = torch.randint(16, (32,))
    anchor, positive, negative = (classes[each] + 0.3 * torch.randn(32, 12) for each in (label, label, 15 - label))
    if step > 5 and step % 2 == 0:
        positive[3] = anchor[3]
    with torch.autocast("cpu", torch.float16):
        one, same, other = (network(each).float() for each in (anchor, positive, negative))
    near, far = ((one - each).square().sum(-1).sqrt() for each in (same, other))
    loss = nn.functional.relu(near - far + 1).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
