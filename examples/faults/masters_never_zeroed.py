"""Gradients are added to FP32 masters whose .grad is never zeroed: zero_grad() is called on the BF16 model alone."""

# Thread: https://github.com/facebookresearch/nwm/issues/16
# Finding: gradients-never-zeroed, from step 1
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 40)).bfloat16()
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=3e-3)
for step in range(40):
    tokens = (torch.randint(0, 40, (32, 1)) + torch.arange(5)) % 40
    loss = F.cross_entropy(model(tokens[:, :4]).float(), tokens[:, 4])
    model.zero_grad()
    loss.backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
