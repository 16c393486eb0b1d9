"""One autocast region is opened around the whole loop: its cache keeps the casts of the first weights."""

# Thread: https://github.com/X-GenGroup/Flow-Factory/issues/186
# Finding: autocast-around-updates, from step 1
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 4))
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
truth = torch.randn(20, 4)
with torch.autocast("cpu", torch.bfloat16):
    for step in range(30):
        x = torch.randn(64, 20)
        loss = nn.functional.mse_loss(policy(x).float(), torch.tanh(x @ truth).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
