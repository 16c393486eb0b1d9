"""A hand-written cross-entropy takes the logarithm of probabilities that a sharp softmax rounds to zero."""

# Thread: https://github.com/pytorch/pytorch/issues/7462
# Finding: argument-out-of-range, from step 5
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = torch.randn(32, 10), torch.randint(0, 4, (32,))
    temperature = 1.0 if step < 5 else 1e-4
    probabilities = (model(x) / temperature).softmax(-1)
    one_hot = nn.functional.one_hot(y, 4).float()
    loss = -(one_hot * probabilities.log()).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
