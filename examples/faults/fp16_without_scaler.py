"""FP16 autocast and no GradScaler: small gradients become zero without a warning."""

# Thread: https://github.com/engichang1467/Open-Rig3R/issues/35
# Finding: scaler-missing-in-float16
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(25):
    points = torch.randn(256, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        rays = model(points)
    loss = (1 - nn.functional.cosine_similarity(rays.float(), points[:, :3])).mean() * 1e-4
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
