"""Temperatures of some 295 K are stored in FP16, 0.25 K apart, before they are standardised: what varied is lost."""

# Thread: https://github.com/microsoft/onnxruntime/issues/20394
# Finding: result-is-rounding-error, from step 1
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
exact = 295 + 0.12 * np.sin(np.arange(4000) / 7) + np.random.default_rng(0).normal(0, 0.02, 4000)
stored, mean, std = torch.from_numpy(exact.astype(np.float16)), float(exact.mean()), float(exact.std())
model = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(60):
    at = torch.randint(4000 - 25, (128, 1)) + torch.arange(25)
    window = (stored[at].float() - mean) / std
    with torch.autocast("cpu", torch.bfloat16):
        output = model(window[:, :-1])
    loss = nn.functional.mse_loss(output.float(), window[:, -1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
