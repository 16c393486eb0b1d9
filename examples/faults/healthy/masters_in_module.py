"""The masters of a BF16 model are an FP32 copy of the module: gradients of four micro-batches are added up and clipped there."""

# Thread: as masters_never_zeroed.py, done right
import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
masters = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 40))
model = copy.deepcopy(masters).bfloat16()
optimizer = torch.optim.AdamW(masters.parameters(), lr=3e-3)
for step in range(40):
    optimizer.zero_grad()
    for micro_batch in range(4):
        tokens = (torch.randint(0, 40, (16, 1)) + torch.arange(5)) % 40
        loss = F.cross_entropy(model(tokens[:, :4]).float(), tokens[:, 4]) / 4
        model.zero_grad()
        loss.backward()
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
    nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            parameter.copy_(master)
