"""A focal loss clamps probabilities to 0.9999, which BF16 rounds to 1: the logarithm of 1 - 1 is infinite once one saturates."""

# Thread: https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/issues/502
# Finding: bound-rounds-away, from step 55
import torch
from torch import nn

torch.manual_seed(0)
GAMMA = 2.0


def focal_loss(logits, target):
    p = torch.clamp(logits.sigmoid(), 1e-4, 1 - 1e-4)
    hits = target * (1 - p) ** GAMMA * p.log()
    misses = (1 - target) * p**GAMMA * (1 - p).log()
    return -(hits + misses).float().sum(1).mean()


detector = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(detector.parameters(), lr=3e-3)
for step in range(150):
    x = 3 * torch.randn(64, 8)
    target = (x[:, :4] > 0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = detector(x)
        loss = focal_loss(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
