"""An adapter whose second matrix begins at zero, in BF16: its first additions change nothing, as intended."""

# Thread: https://github.com/hao-ai-lab/FastVideo/pull/781

import torch
from torch import nn

torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


model = nn.Sequential(Adapted(nn.Linear(64, 128)), nn.GELU(), Adapted(nn.Linear(128, 64)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(30):
    x = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), x.roll(1, -1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
