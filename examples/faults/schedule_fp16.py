"""A noise schedule is stored in FP16: its first entry rounds to 1, and a weight of a / (1 - a) divides by zero."""

# Thread: https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/issues/2
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
STEPS = 1000
# The rest of the signal after each step of noise.
signal = torch.cumprod(1 - torch.linspace(1e-5, 0.02, STEPS), 0).half()
denoiser = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(30):
    x, noise, t = torch.randn(64, 16).half(), torch.randn(64, 16).half(), torch.randint(0, STEPS, (64, 1))
    a = signal[t]
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    with torch.autocast("cpu", torch.float16):
        predicted = denoiser(torch.cat([noisy, t.half() / STEPS], 1))
    loss = (a / (1 - a) * (predicted - noise) ** 2).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
