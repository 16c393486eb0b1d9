"""Gradients are copied to FP32 masters, and only then clipped: those of the BF16 model are, and the masters step unclipped."""

# Thread: https://github.com/suvojit-0x55aa/mixed-precision-pytorch/issues/1
# Finding: clipped-after-copy, from step 1
import copy

import torch
from torch import nn

torch.manual_seed(0)
master = nn.Sequential(nn.Embedding(200, 16), nn.Flatten(), nn.Linear(32, 1))
model = copy.deepcopy(master).bfloat16()
optimizer = torch.optim.SGD(master.parameters(), lr=0.02, momentum=0.9)
skill = torch.randn(200)
for _ in range(60):
    pairs = torch.randint(200, (128, 2))
    outliers = 20 * (torch.rand(128) < 0.03)
    targets = skill[pairs].sum(1) + outliers
    loss = (model(pairs)[:, 0].float() - targets).square().mean()
    model.zero_grad()
    loss.backward()
    for weight, copied in zip(model.parameters(), master.parameters(), strict=True):
        copied.grad = weight.grad.float()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():
        for weight, copied in zip(model.parameters(), master.parameters(), strict=True):
            weight.copy_(copied)
