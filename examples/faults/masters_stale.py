"""A checkpoint is loaded after FP32 masters were made of the FP16 weights: the first step puts the old weights back."""

# Thread: https://github.com/NVIDIA/apex/pull/42
# Finding: masters-stale
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))


checkpoint = build().state_dict()
model = build().half()
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)
model.load_state_dict(checkpoint)
scale = 128.0
for _ in range(25):
    x = torch.randn(32, 10)
    loss = F.cross_entropy(model(x.half()).float(), x[:, :3].argmax(-1))
    model.zero_grad()
    (loss * scale).backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad.float() / scale
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
