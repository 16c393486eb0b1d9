"""Rotary positions are computed in BF16: beyond 256 neighbours have the same position."""

# Thread: https://github.com/huggingface/diffusers/issues/13920
# Finding: positions-collapse in 0.rotary, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, positions):
        angles = positions.to(torch.bfloat16)[:, None] * self.inv_freq.to(torch.bfloat16)[None]
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.rotary = Rotary(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        cos, sin = self.rotary(torch.arange(x.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (t.chunk(2, -1) for t in (q, k)))
        return nn.functional.scaled_dot_product_attention(q, k, v.to(q.dtype))


model = nn.Sequential(Attention(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(1, 600, 32)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
