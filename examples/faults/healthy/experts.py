"""A mixture of experts routed in FP32: most experts get no token in most steps."""

# Thread: as router_ties.py and stale_branch.py, done right
import torch
from torch import nn

torch.manual_seed(0)


class MoE(nn.Module):
    def __init__(self, width=16, experts=8):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = weight[mine, None] * expert(x[mine])
        return out


model = MoE()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(6, 16)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
