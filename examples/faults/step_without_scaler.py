"""The loop unscales and clips, and then steps the optimizer itself: nothing skips the steps that overflow."""

# Thread: https://docs.pytorch.org/docs/stable/notes/amp_examples.html (gradient clipping: scaler.step skips, unscale_ does not)
# Finding: scaler-step-missing in 4, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 5)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

for step in range(20):
    x = torch.randn(16, 3, 12, 12)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    loss = nn.functional.cross_entropy(scores.float(), x.mean((1, 2, 3)).sign().long() + 1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scaler.update()
    print(f"step {step}: loss {loss.item():.4f}")
