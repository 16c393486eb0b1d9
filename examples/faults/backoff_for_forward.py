"""The forward overflows FP16 from some step on; the scaler backs off for it, again and again, which cannot help."""

# Thread: https://github.com/unslothai/unsloth/issues/4014
# Finding: overflow-in-operator in mlp, from step 6
import torch
from torch import nn

torch.manual_seed(0)


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = GatedMLP(32)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.mlp(x))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(20):
    x = torch.randn(16, 32) * (2000.0 if step >= 6 else 1.0)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), torch.randint(0, 2, (16,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
