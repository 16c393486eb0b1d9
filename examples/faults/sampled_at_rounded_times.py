"""A denoiser runs in BF16, its fractional times as well: neighbouring times become equal, and the samples are off."""

# Thread: https://github.com/modelscope/DiffSynth-Studio/issues/1025
# Finding: positions-collapse, from step 0
import math

import torch
from torch import nn

torch.manual_seed(0)


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(-math.log(1000) * torch.arange(width // 2) / (width // 2)))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 8))

    def forward(self, x, time):
        angles = time[:, None] * self.frequencies
        return x - self.time(torch.cat([angles.sin(), angles.cos()], 1))


model = Denoiser().to(torch.bfloat16).eval()
x = torch.randn(16, 8, dtype=torch.bfloat16)
with torch.inference_mode():
    for step in range(20):
        time = torch.full((16,), 999.0 - 49.3 * step, dtype=torch.bfloat16) * 1.37
        x = x + (model(x, time) - x) / 20
print(x.float().std())
