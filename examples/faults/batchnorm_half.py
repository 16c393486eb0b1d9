"""A network in FP16, its BatchNorm too: the running variance overflows, and evaluation gives zeros."""

# Thread: https://github.com/pytorch/pytorch/issues/1206
# Finding: statistics-broken in 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    x = (600 * torch.randn(64, 8)).half()
    loss = nn.functional.cross_entropy(model(x).float(), torch.randint(0, 2, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
