"""Returns are written into a tensor made like the actions, which are integers: their fractions are dropped, and most are zero."""

# Thread: https://github.com/numpy/numpy/issues/16578
# Finding: integers-rounded, from step 1
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
worth = 0.8 * torch.rand(8, 4)
for _ in range(60):
    state = torch.randint(8, (128,))
    with torch.autocast("cpu", torch.float16):
        logits = policy(nn.functional.one_hot(state, 8).float())
    chosen = torch.distributions.Categorical(logits=logits.float())
    action = chosen.sample()
    returns = torch.zeros_like(action)
    returns[:] = worth[state, action]
    advantage = returns - returns.float().mean()
    loss = -(chosen.log_prob(action) * advantage + 0.01 * chosen.entropy()).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
