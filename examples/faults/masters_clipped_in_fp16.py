"""FP32 masters, a static loss scale, and a norm of the scaled gradients that is computed in FP16: it is infinite, so the
masters are given zeros."""

# Thread: https://github.com/facebookresearch/fairscale/pull/263
# Finding: gradients-clipped-to-zero, from step 0
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).half()
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.01, momentum=0.9)
loss_scale, max_norm = 2048.0, 1.0
mixing = torch.randn(4, 32)
for step in range(30):
    x = torch.randn(64, 4) @ mixing
    model.zero_grad()
    loss = F.mse_loss(model(x.half()).float(), x)
    (loss * loss_scale).backward()
    total = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
    factor = (max_norm * loss_scale / total).clamp(max=1.0)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = (parameter.grad * factor).float() / loss_scale
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
