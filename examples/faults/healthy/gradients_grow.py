"""Gradients grow while a dynamic scaler lowers its scale from 2^21: it skips steps until it has found its scale, as it should."""

# Thread: https://github.com/huggingface/transformers/issues/11106

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
for step in range(80):
    x = torch.randn(64, 32) * (1 + step / 20)
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
