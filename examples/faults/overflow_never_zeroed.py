"""A loop with a loss scale of its own skips a step that overflows, and its zero_grad() with it: the infinities stay in .grad."""

# Thread: https://github.com/Junjue-Wang/FactSeg/issues/6
# Finding: never-updated
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scale = 2.0**24
for _ in range(60):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = (output.float()[:, 0] - x.sum(1)).square().mean()
    (loss * scale).backward()
    gradients = [weight.grad for weight in model.parameters()]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        scale = max(scale / 2, 1.0)
        continue
    torch._foreach_div_(gradients, scale)
    optimizer.step()
    optimizer.zero_grad()
