"""A sensor's glitch is beyond FP16's range: the first layer's cast makes an infinity of it."""

# Thread: https://github.com/NVIDIA/TensorRT/issues/1122
# Finding: batch-beyond-float16 in encode, from step 6
import torch
from torch import nn

torch.manual_seed(0)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, readings):
        return self.head(torch.relu(self.encode(readings)))


model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(16):
    readings = torch.randn(16, 8)
    if step == 6:
        readings[5, 2] = 1e5
    with torch.autocast("cpu", torch.float16):
        forecast = model(readings)
    loss = nn.functional.mse_loss(forecast.float(), readings.clamp(-3, 3).mean(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
