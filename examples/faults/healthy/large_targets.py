"""A squared error of large targets, taken in FP32 behind BF16 autocast."""

# Thread: as mse_in_fp16.py, done right
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(20):
    x, price = torch.randn(32, 6), 200 + 100 * torch.rand(32, 1)
    with torch.autocast("cpu", torch.bfloat16):
        prediction = model(x)
    loss = (prediction.float() - price).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
