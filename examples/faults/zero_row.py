"""Rows are divided by their largest magnitude; a silent row is 0/0."""

# Thread: https://github.com/pytorch/ao/issues/4713
# Finding: zero-row-normalized in normalize, from step 6
import torch
from torch import nn

torch.manual_seed(0)


class Normalize(nn.Module):
    def forward(self, x):
        return x / x.abs().amax(dim=-1, keepdim=True)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize = Normalize()
        self.classify = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x):
        return self.classify(self.normalize(x))


model = Speech()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(14):
    frames = torch.randn(12, 40)
    if step == 6:
        frames[4] = 0
    loss = nn.functional.cross_entropy(model(frames), torch.randint(0, 6, (12,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
