"""A state-space layer sums up its decays in BF16: differences of large sums are off, and their exponentials far more."""

# Thread: https://github.com/vllm-project/vllm/pull/37501 is near: differences of the same sums round to positive exponents
# Finding: result-is-rounding-error, from step 31
import torch
from torch import nn

torch.manual_seed(0)
LENGTH = 256
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.step = nn.Linear(2, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        step = nn.functional.softplus(self.step(x))
        total = (-step).cumsum(1)
        decay = (total[:, :, None] - total[:, None]).masked_fill(FUTURE[..., None], float("-inf")).exp()
        return self.head((decay * (step * self.value(x))[:, None]).sum(2)).squeeze(-1)


def batch():
    x, state, states = torch.randn(4, LENGTH, 2), torch.zeros(4), []
    step = nn.functional.softplus(x[..., 1] + 1)
    for now in range(LENGTH):
        state = torch.exp(-step[:, now]) * state + step[:, now] * x[:, now, 0]
        states.append(state)
    return x, torch.stack(states, 1)


model = Decaying()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
for number in range(34):
    x, target = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(x)
    loss = nn.functional.mse_loss(predicted.float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
