"""Moving averages of a series are differences of its running sum in FP32, which ends near 10^8: numbers lie 8 apart there."""

# Thread: https://github.com/wadpac/GGIR/issues/326
# Finding: prepared-in-fp32
import torch
from torch import nn

torch.manual_seed(0)
waves = torch.arange(200_000) / 25
signal = 500 + waves.sin() + 0.2 * torch.randn(200_000)
total = nn.functional.pad(signal.cumsum(0), (1, 0))
smooth = (total[16:] - total[:-16]) / 16
model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(40):
    starts = torch.randint(len(smooth) - 64, (128,))
    x = smooth[starts[:, None] + torch.arange(32)] - 500
    y = waves[starts + 40].sin()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)[:, 0]
    loss = nn.functional.mse_loss(output.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
