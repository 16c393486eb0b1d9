"""A loop in a closure, as Lightning's, counts its steps in BF16: the counter stops at 256, and the schedule with it."""

# Thread: https://github.com/pytorch/xla/pull/2425
# Finding: buffer-stops-changing, from step 101
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
model.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
truth = torch.randn(16, 4)


def closure():
    with torch.enable_grad():
        optimizer.zero_grad()
        x = torch.randn(32, 16)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x).float()
        penalty = (model.seen / 300).clamp(max=1) * output.square().mean()
        model.seen += 1
        loss = nn.functional.mse_loss(output, x @ truth) + penalty
        loss.backward()
    return loss


for step in range(300):
    optimizer.step(closure)
