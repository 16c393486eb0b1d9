"""A rollout keeps its discounts in BF16, where 0.999 is 1. The returns are sums without discount: ten times too large."""

# Thread: https://github.com/OpenRLHF/OpenRLHF/pull/1334
# Finding: gradients-inaccurate, from step 60
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
turn = torch.linalg.qr(torch.randn(4, 4))[0] * 0.9
for _ in range(4):
    state, states, rewards, discounts = torch.randn(16, 4), [], [], []
    for _ in range(2000):
        states.append(state)
        rewards.append((1 + state[:, 0]) / 1000)
        discounts.append(torch.full((16,), 0.999).bfloat16())
        state = state @ turn + 0.4 * torch.randn(16, 4)
    with torch.no_grad():
        total, returns = critic(state)[:, 0], []
        for reward, discount in zip(reversed(rewards), reversed(discounts), strict=True):
            total = reward + discount.float() * total
            returns.append(total)
    x, target = torch.cat(states), torch.cat(returns[::-1])
    for _ in range(20):
        rows = torch.randint(len(x), (256,))
        with torch.autocast("cpu", torch.bfloat16):
            value = critic(x[rows])[:, 0]
        loss = nn.functional.mse_loss(value.float(), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
