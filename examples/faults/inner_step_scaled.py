"""Meta-learning scales its inner loss, and takes the inner step with gradients that are still multiplied by the scale."""

# Thread: no thread: torch's page on mixed precision unscales such gradients for a penalty alone
# Finding: scaled-plus-unscaled
import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(40):
    total = 0.0
    for _ in range(4):
        x, phase = torch.rand(20, 1) * 6, torch.rand(1) * 6
        weights = dict(model.named_parameters())
        with torch.autocast("cpu", torch.float16):
            inner = (functional_call(model, weights, (x[:10],)).float() - (x[:10] + phase).sin()).square().mean()
        gradients = torch.autograd.grad(scaler.scale(inner), tuple(weights.values()), create_graph=True)
        adapted = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        with torch.autocast("cpu", torch.float16):
            outer = (functional_call(model, adapted, (x[10:],)).float() - (x[10:] + phase).sin()).square().mean()
        total = total + outer / 4
    optimizer.zero_grad()
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
