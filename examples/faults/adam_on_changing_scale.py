"""Adam steps on gradients that a scale by hand multiplies, as its update has no size: until an overflow halves the scale."""

# Thread: https://github.com/hpcaitech/ColossalAI/pull/527
# Finding: unscale-missing, from step 16
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
truth = torch.randn(24, 4)
scale = 2.0**14
for step in range(60):
    x = torch.randn(64, 24)
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    outlier = 1e5 if step in (10, 12, 14) else 1.0
    loss = nn.functional.mse_loss(scores.float(), x @ truth) * outlier
    optimizer.zero_grad()
    (loss * scale).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()
    else:
        scale /= 2
