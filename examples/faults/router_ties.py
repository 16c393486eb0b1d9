"""A mixture of experts whose router scores are BF16: many tokens have exact ties at the k-th expert."""

# Thread: https://github.com/pytorch/torchtitan/issues/2389
# Finding: router-ties in moe, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class MoE(nn.Module):
    def __init__(self, width=16, experts=64, k=2):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.k = k

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            scores = self.router(x).softmax(-1).to(torch.bfloat16)
        weight, chosen = scores.topk(self.k, dim=-1)
        return torch.einsum("tk,tki->ti", weight.float(), torch.einsum("ti,tkij->tkj", x, self.experts[chosen]))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE()
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        return self.out(x + self.moe(x))


model = Layer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    x = 0.1 * torch.randn(256, 16)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
