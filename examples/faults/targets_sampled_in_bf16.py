"""A student learns from samples of a long diffusion whose state is BF16: most of its steps are below half a unit."""

# Thread: https://github.com/finegrain-ai/refiners/pull/449
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
STEPS = 4000
rate = torch.tensor([[0.9, -0.4], [0.5, 0.7]])


@torch.no_grad()
def sampled(noise):
    state = noise.to(torch.bfloat16)
    for step in range(STEPS):
        drift = (rate @ state.float().mT).mT.tanh() + 1.5 * step / STEPS
        state = state + (drift / STEPS).to(state.dtype)
    return state.float()


noise = torch.randn(512, 2)
samples = sampled(noise)
student = nn.Sequential(nn.Linear(2, 48), nn.SiLU(), nn.Linear(48, 2))
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
for _ in range(40):
    rows = torch.randint(len(noise), (128,))
    with torch.autocast("cpu", torch.bfloat16):
        output = student(noise[rows])
    loss = nn.functional.mse_loss(output.float(), samples[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
