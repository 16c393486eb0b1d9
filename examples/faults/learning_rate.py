"""An MLP trained at a learning rate that is far too high: its weights explode, then everything is infinite."""

# Thread: https://github.com/Bohao-Lee/CME/issues/12
# Finding: weights-exploded
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
for step in range(30):
    x = torch.randn(64, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
