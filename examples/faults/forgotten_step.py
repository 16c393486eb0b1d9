"""Two networks trained in turn, each with an optimizer and one scaler for both: the step of the first was forgotten."""

# Thread: no thread: https://github.com/pytorch/pytorch/issues/67590 asks how to see that a step was taken
# Finding: never-updated
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
predictor = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer_e = torch.optim.Adam(encoder.parameters(), lr=1e-3)
optimizer_p = torch.optim.Adam(predictor.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(20):
    x = torch.randn(64, 8)
    with torch.autocast("cpu", torch.float16):
        value = predictor(encoder(x))
    loss = (value.float() - x.sum(1, keepdim=True)).square().mean()
    optimizer_e.zero_grad()
    optimizer_p.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer_p)
    scaler.update()
