"""The weights' moving average is kept in BF16: with a decay of 0.9999 every step of it rounds away."""

# Thread: https://github.com/d8ahazard/sd_dreambooth_extension/issues/1417
# Finding: buffer-stops-changing, from step 1
import copy

import torch
from torch import nn

torch.manual_seed(0)
unet = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
ema = copy.deepcopy(unet).to(torch.bfloat16).requires_grad_(False)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
for step in range(40):
    clean = torch.randn(32, 16)
    noise = torch.randn_like(clean)
    loss = nn.functional.mse_loss(unet(clean + noise), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), unet.parameters(), strict=True):
            average.lerp_(weight.to(average.dtype), 1 - 0.9999)
