"""FP16 gradients are clipped by a norm that is summed up in FP16 by hand: it is infinite, so every gradient becomes
zero."""

# Thread: https://github.com/NVIDIA-NeMo/Automodel/issues/825
# Finding: gradients-clipped-to-zero, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def clip_(parameters, limit):
    total = sum(p.grad.square().sum() for p in parameters).sqrt()
    for p in parameters:
        p.grad.mul_(limit / total)


for step in range(15):
    x = torch.randn(64, 32).half()
    loss = 1e3 * (model(x).float() - 1).square().sum()
    optimizer.zero_grad()
    loss.backward()
    clip_(list(model.parameters()), 1.0)
    optimizer.step()
