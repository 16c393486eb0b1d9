"""A critic's returns become two-hot targets in BF16: positions lose their fraction, and floor and ceiling are one bin."""

# Thread: https://github.com/Curt-Park/rainbow-is-all-you-need/pull/76
# Finding: choices-differ, from step 1
import torch
from torch import nn

torch.manual_seed(0)
BINS, LARGEST = 255, 20.0
critic = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, BINS))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
direction = torch.randn(16) * 2


def two_hot(returns):
    position = (returns.clamp(-LARGEST, LARGEST) + LARGEST) * ((BINS - 1) / (2 * LARGEST))
    low, high = position.floor(), position.ceil()
    target = torch.zeros(len(returns), BINS)
    target.scatter_add_(1, low.long()[:, None], (high - position).float()[:, None])
    return target.scatter_add_(1, high.long()[:, None], (position - low).float()[:, None])


for step in range(12):
    states = torch.randn(128, 16)
    returns = (states @ direction).bfloat16()  # as a model in BF16 returns them
    with torch.autocast("cpu", torch.bfloat16):
        logits = critic(states)
    target = two_hot(returns - 0.99 * returns.roll(1))
    loss = -(target * logits.float().log_softmax(-1)).sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
