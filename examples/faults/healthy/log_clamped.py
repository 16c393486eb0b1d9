"""A hand-written cross-entropy whose probabilities are clamped before the logarithm, and a distance with an epsilon."""

# Thread: as log_of_zero.py and norm_at_zero.py, done right
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = torch.randn(32, 10), torch.randint(0, 4, (32,))
    probabilities = model(x).softmax(-1).clamp_min(1e-6)
    distance = (probabilities - 0.25).square().sum(1).add(1e-12).sqrt()
    loss = -(nn.functional.one_hot(y, 4) * probabilities.log()).sum(1).mean() + 0.1 * distance.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
