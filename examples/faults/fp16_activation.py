"""A gated MLP whose product of gate and up projection grows beyond FP16 in its third step."""

# Thread: https://github.com/unslothai/unsloth-zoo/issues/600
# Finding: overflow-in-operator in layers.0, from step 2
import torch
from torch import nn

torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MLP(24) for _ in range(2))
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    x = torch.randn(8, 24) * (1 if step < 2 else 1500)
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
