"""A conversion of every layer to FP8: the router that chooses the experts is one of them."""

# Thread: https://github.com/pytorch/torchtitan/issues/1043
# Finding: narrow-router in 1.router
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training


class Experts(nn.Module):
    def __init__(self, width=64, experts=16):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        rows = [self.experts[int(expert)](row[None]) for row, expert in zip(x, chosen, strict=True)]
        return x + weight[:, None] * torch.cat(rows)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, bias=False), Experts(), nn.Linear(64, 64, bias=False))
convert_to_float8_training(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(10):
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
