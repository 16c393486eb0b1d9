"""BF16 autocast with a GradScaler, which BF16 does not need: steps with inf or NaN are skipped silently."""

# Thread: https://github.com/huggingface/accelerate/pull/1036
# Finding: scaler-in-bfloat16
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(25):
    x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
