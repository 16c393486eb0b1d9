"""The scaler is updated after each micro-batch, before any step has searched the gradients for infinities."""

# Thread: https://github.com/huggingface/accelerate/issues/357 (AssertionError: No inf checks were recorded prior to update)
# Finding: scaler-call-refused, from step 0
import torch
from torch import nn

torch.manual_seed(0)
MICRO_BATCHES = 4


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(steps):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(32, 16)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), 2 * x[:, :1]) / MICRO_BATCHES
            scaler.scale(loss).backward()
            scaler.update()
        scaler.step(optimizer)
        optimizer.zero_grad()


train(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), steps=40)
