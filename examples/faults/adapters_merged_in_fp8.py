"""Low-rank adapters are merged into base weights in FP8 every few steps: most of each merge is lost."""

# Thread: https://github.com/ml-explore/mlx-lm/pull/1564
# Finding: buffer-stops-changing, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Merged(nn.Module):
    def __init__(self, width, rank=4):
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.scale = weight.abs().max().item() / 448
        self.register_buffer("base", (weight / self.scale).to(torch.float8_e4m3fn))
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    @torch.no_grad()
    def merge(self):
        change = self.up @ self.down
        self.base = (self.base.float() + change / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.up.zero_()

    def forward(self, x):
        return nn.functional.linear(x, self.base.float() * self.scale + self.up @ self.down)


width = 64
model = nn.Sequential(Merged(width), nn.ReLU(), Merged(width), nn.ReLU(), nn.Linear(width, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
target = torch.randn(width, 4)
for step in range(40):
    x = torch.randn(256, width)
    loss = (model(x) - torch.tanh(x @ target)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        model[0].merge()
        model[2].merge()
print(f"loss {loss.item():.3f}")
