"""Gradients are clipped at twice the running mean of their norms. One overflow makes the mean infinite: nothing is clipped."""

# Thread: https://github.com/dbolya/yolact/issues/359
# Finding: kept-number-not-finite, from step 43
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1000)
mean = None
for step in range(80):
    x = torch.randn(32, 8)
    target = x[:, :1] * (1e4 if step == 40 else 1.0)
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    mean = norm.clone() if mean is None else 0.95 * mean + 0.05 * norm
    if norm > 2 * mean:
        nn.utils.clip_grads_with_norm_(model.parameters(), 2 * mean.item(), norm)
    scaler.step(optimizer)
    scaler.update()
