"""FP32 masters are stepped and copied back into what .float() returns, a copy: the FP16 model never changes."""

# Thread: https://github.com/YU1ut/MixMatch-pytorch/pull/23
# Finding: never-updated
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)).half()
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)
scale = 128.0
for _ in range(25):
    x = torch.randn(32, 10)
    loss = F.cross_entropy(model(x.half()).float(), x[:, :3].argmax(-1))
    model.zero_grad()
    (loss * scale).backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad.float() / scale
    optimizer.step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data.float().copy_(master.data)
