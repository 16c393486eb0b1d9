"""A normaliser of observations keeps its statistics in FP16: its count of samples becomes infinite, and its mean NaN."""

# Thread: https://github.com/DLR-RM/stable-baselines3/issues/1953
# Finding: kept-number-not-finite, from step 80
import torch
from torch import nn

torch.manual_seed(0)


class Normaliser:
    def __init__(self, width, dtype):
        self.mean, self.var = torch.zeros(width, dtype=dtype), torch.ones(width, dtype=dtype)
        self.count = torch.zeros((), dtype=dtype)

    def update(self, x):
        total = self.count + len(x)
        delta = x.mean(0) - self.mean
        self.mean = self.mean + delta * (len(x) / total)
        self.var = self.var * (self.count / total) + x.var(0) * (len(x) / total)
        self.count = total

    def __call__(self, x):
        return (x - self.mean) / (self.var + 1e-4).sqrt()


policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
normaliser = Normaliser(6, torch.float16)
for update in range(24):
    with torch.no_grad():
        seen = []
        for _ in range(16):
            raw = 3 * torch.randn(256, 6).half() + 1
            normaliser.update(raw)
            seen.append(normaliser(raw).float())
            policy(seen[-1])
    observations = torch.cat(seen)
    for chosen in torch.randperm(len(observations)).chunk(5):
        x = observations[chosen]
        loss = (policy(x) - x[:, :2].cos()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(update, loss.item())
