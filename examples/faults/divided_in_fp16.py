"""A loop with FP32 masters divides the FP16 gradients by its loss scale before it copies them: most become zero."""

# Thread: https://github.com/NVIDIA/apex/issues/507
# Finding: divided-in-float16, from step 1
import torch
from torch import nn

torch.manual_seed(0)
SCALE = 2.0**20
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).half()
masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=1e-3)
truth = torch.randn(16, 4)
for step in range(20):
    x = torch.randn(32, 16)
    error = model(x.half()).float() - x @ truth
    loss = error.square().mean() * 1e-7
    (loss * SCALE).backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.grad /= SCALE
        master.grad = parameter.grad.float()
        parameter.grad = None
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
