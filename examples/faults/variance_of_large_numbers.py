"""A variance is the mean of squares less the square of the mean, of pressures in pascals: in FP32 some are negative."""

# Thread: https://github.com/metatensor/metatensor/issues/902
# Finding: fp32-too-coarse in spread, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Spread(nn.Module):
    def forward(self, x):
        variance = (x * x).mean(-1) - x.mean(-1) ** 2
        return variance.sqrt()


class Barometers(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = Spread()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pressure):
        with torch.autocast("cpu", enabled=False):
            features = self.spread(pressure * self.scale)
        return self.head(features)[:, 0]


model = Barometers()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(30):
    storms = torch.rand(128, 8) * 20
    pressure = 101_325 + storms[..., None] * torch.randn(128, 8, 16)
    with torch.autocast("cpu", torch.float16):
        output = model(pressure)
    loss = (output.float() - storms.mean(-1)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
