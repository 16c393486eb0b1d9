"""A compiled encoder adds the features of 600 points of a cloud up in BF16, where a sum of ones stops at 256."""

# Thread: https://github.com/rusty1s/pytorch_scatter/issues/269
# Finding: sum-loses-terms in pool, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Pool(nn.Module):
    def forward(self, points, cloud):
        clouds = torch.zeros(2, points.shape[1], dtype=points.dtype)
        return clouds.index_put((cloud,), points, accumulate=True)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.pool, self.head = nn.Linear(3, 16), Pool(), nn.Linear(16, 4)

    def forward(self, points, cloud):
        return self.head(self.pool(self.features(points).sigmoid(), cloud) / 600)


encoder = Encoder()
compiled = torch.compile(encoder, backend="aot_eager")
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
cloud = torch.arange(1200) % 2
for step in range(20):
    optimizer.zero_grad()
    points = torch.randn(1200, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(points, cloud).float().square().mean()
    loss.backward()
    optimizer.step()
