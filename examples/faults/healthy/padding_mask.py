"""Padded tokens are masked by -inf, and every row keeps at least one token."""

# Thread: as masked_row.py, done right
import math

import torch
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~keep[:, None, :], -math.inf)
        return self.proj(scores.softmax(-1) @ v)


model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "attn": Attention(16), "head": nn.Linear(16, 2)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    tokens, lengths = torch.randint(0, 50, (4, 10)), torch.randint(1, 10, (4,))
    keep = torch.arange(10)[None] < lengths[:, None]
    hidden = model["embed"](tokens)
    loss = nn.functional.cross_entropy(model["head"](model["attn"](hidden, keep).mean(1)), torch.randint(0, 2, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
