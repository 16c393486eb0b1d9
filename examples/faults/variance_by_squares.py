"""A variance as the mean of squares less the square of the mean, in BF16: of inputs around 40 only rounding error is left."""

# Thread: https://github.com/tenstorrent/tt-metal/issues/45968
# Finding: result-is-rounding-error in standardize, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Standardize(nn.Module):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (variance.abs() + 1e-2).rsqrt()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.standardize, self.head = nn.Linear(32, 64), Standardize(), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.standardize(self.project(x) + 40))


model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(15):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(x)
    loss = nn.functional.cross_entropy(scores.float(), x[:, 0].gt(0).long() + 2 * x[:, 1].gt(0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
