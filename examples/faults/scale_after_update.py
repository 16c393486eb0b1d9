"""A dynamic scale by hand is raised before the gradients are divided by it: in these steps they are halved."""

# Thread: https://github.com/deepspeedai/DeepSpeed/issues/8588
# Finding: divided-by-another-scale, from step 3
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
truth = torch.randn(24, 4)
scale, good = 2.0**8, 0
for step in range(24):
    x = torch.randn(64, 24)
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    loss = nn.functional.mse_loss(scores.float(), x @ truth)
    optimizer.zero_grad()
    (loss * scale).backward()
    is_finite = all(p.grad.isfinite().all() for p in model.parameters())
    good = good + 1 if is_finite else 0
    if not is_finite:
        scale /= 2
    elif good % 4 == 0:
        scale *= 2
    if is_finite:
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
