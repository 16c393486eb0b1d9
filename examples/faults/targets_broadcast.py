"""Outputs of shape (n, 1) less targets of shape (n,): the difference has all pairs, and the network learns the mean."""

# Thread: https://github.com/pytorch/pytorch/issues/16045
# Finding: difference-broadcasts, from step 1
import torch
from torch import nn

torch.manual_seed(0)
value = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)
truth = torch.randn(8)
for _ in range(60):
    state = torch.randn(128, 8)
    returns = state @ truth
    with torch.autocast("cpu", torch.bfloat16):
        predicted = value(state)
    loss = (predicted.float() - returns).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
