"""The squared error is taken in FP16: a difference of 256 or more overflows."""

# Thread: https://github.com/Modalities/modalities/issues/464
# Finding: overflow-in-operator, from step 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(10):
    x = torch.randn(32, 6).half()
    price = (200 + 100 * torch.rand(32, 1)).half()
    loss = (model(x) - price).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
