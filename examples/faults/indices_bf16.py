"""Sparse attention finds its neighbours' indices in the BF16 of the distances: beyond 256, most indices change."""

# Thread: https://github.com/RosettaCommons/foundry/pull/236
# Finding: positions-collapse in attention, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class NearestAttention(nn.Module):
    def __init__(self, width=16, nearest=8):
        super().__init__()
        self.qkv, self.nearest = nn.Linear(width, 3 * width), nearest

    def forward(self, x, places):
        q, k, v = self.qkv(x).chunk(3, -1)
        distances = (places[:, None] - places[None]).abs().to(q.dtype)
        indices = torch.arange(len(x), dtype=distances.dtype).expand_as(distances)
        is_near = distances <= distances.kthvalue(self.nearest, dim=-1, keepdim=True).values
        # Distant elements have the largest index, so they are sorted behind the near ones.
        near = torch.where(is_near, indices, len(x) - 1.0).sort(-1).values[:, : self.nearest].long()
        near = near.clamp(max=len(x) - 1)
        weights = torch.einsum("nd,nkd->nk", q, k[near]).softmax(-1)
        return torch.einsum("nk,nkd->nd", weights, v[near])


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.attention, self.out = NearestAttention(width), nn.Linear(width, 4)

    def forward(self, x, places):
        return self.out(x + self.attention(x, places))


model = Layer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    x, places = torch.randn(600, 16), torch.rand(600)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, places).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
