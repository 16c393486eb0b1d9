"""A quadratic trend is fitted by normal equations in FP32, over depths in metres: the inverse is all rounding error."""

# Thread: https://github.com/pytorch/pytorch/issues/65557
# Finding: fp32-too-coarse in trend, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Trend(nn.Module):
    def forward(self, depth, values):
        powers = torch.stack([depth**k for k in range(3)], dim=-1)
        gram = powers.mT @ powers
        weights = torch.linalg.inv(gram) @ powers.mT @ values.mT
        return (powers @ weights).mT


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = Trend()
        self.classify = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 3))

    def forward(self, depth, values):
        with torch.autocast("cpu", enabled=False):
            rest = values - self.trend(depth, values)
        return self.classify(rest)


model = Logs()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
shapes = torch.randn(3, 64)
depth = 2400 + torch.arange(64) * 0.15
for _ in range(50):
    kinds = torch.randint(3, (64,))
    values = 2 + 0.3 * shapes[kinds] + (depth - 2600) / 100 + torch.randn(64, 1) + 0.05 * torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(depth, values)
    loss = nn.functional.cross_entropy(logits.float(), kinds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
