"""GradScaler() is made for CUDA and disables itself in a training on a CPU: FP16 gradients are not scaled."""

# Thread: no thread: torch warns that the scaler is disabled, among other warnings
# Finding: scaler-missing-in-float16
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler()
for step in range(25):
    x = torch.rand(8192, 24)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = 0.01 * model(x)
    loss = nn.functional.mse_loss(predicted.float(), 0.01 * x[:, :2].cos())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
