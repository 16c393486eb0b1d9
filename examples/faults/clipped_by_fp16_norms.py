"""Each gradient is clipped by its own norm, in FP16: the sum of squares of scaled gradients overflows, and the clip zeroes it."""

# Thread: https://github.com/facebookresearch/fairscale/pull/263
# Finding: overflow-in-operator, from step 1
import torch
from torch import nn

torch.manual_seed(0)
SCALE = 512.0
model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))
masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
model.half()
optimizer = torch.optim.AdamW(masters, lr=2e-3)
target = nn.Linear(16, 4)
for _ in range(60):
    x = torch.randn(64, 16)
    with torch.no_grad():
        y = 8 * target(x).tanh() + 4
    loss = (model(x.half()).float() - y).square().mean()
    (loss * SCALE).backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        norm = parameter.grad.pow(2).sum().sqrt()
        parameter.grad.mul_((SCALE / (norm + 1e-6)).clamp(max=1.0))
        master.grad = parameter.grad.float() / SCALE
        parameter.grad = None
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
