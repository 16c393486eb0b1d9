"""Gradients are unscaled and clipped after each micro-batch: the earlier ones are divided by the loss scale again."""

# Thread: https://github.com/huggingface/accelerate/issues/641
# Finding: unscaled-too-often, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(16):
    optimizer.zero_grad()
    for micro_batch in range(4):
        x = torch.randn(32, 16)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), x[:, :4]) / 4
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if micro_batch == 3:
            scaler.step(optimizer)
        scaler.update()
