"""A sampler makes its schedule in BF16: many times become equal, and the search for one of them finds the first."""

# Thread: https://github.com/modelscope/DiffSynth-Studio/issues/562
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)


class Schedule:
    def __init__(self, steps, dtype):
        self.sigmas = torch.linspace(1.0, 0.004, steps, dtype=dtype)

    def step(self, velocity, sigma, sample):
        index = int((self.sigmas - sigma).abs().argmin())
        after = self.sigmas[index + 1] if index + 1 < len(self.sigmas) else torch.zeros_like(sigma)
        return sample + (after - sigma).float() * velocity.float()


model = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 8)).bfloat16().eval()
schedule = Schedule(400, torch.bfloat16)
x = torch.randn(64, 8)
with torch.no_grad():
    for sigma in schedule.sigmas:
        velocity = model(torch.cat([x.bfloat16(), sigma.expand(64, 1)], 1))
        x = schedule.step(velocity, sigma, x)
print(x.std())
