"""Noise is added to gradients that the scaler has not divided yet: after the division it is 4,096 times too weak."""

# Thread: https://github.com/rwth-i6/returnn/pull/1595
# Finding: scaled-plus-unscaled in 0.weight, from step 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(30):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), x[:, :1])
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        parameter.grad += 1e-3 * torch.randn_like(parameter)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
