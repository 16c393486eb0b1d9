"""A recurrent layer casts its decay factors to BF16, where those of the longest memories are 1: these channels get no input."""

# Thread: https://github.com/osaurus-ai/vmlx-swift/issues/433
# Finding: constant-is-one in memory, from step 1
import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.log_rate = nn.Parameter(-torch.logspace(0.5, 3.4, width).log())

    def forward(self, x):
        decay = torch.exp(-self.log_rate.exp()).to(x.dtype)
        gain = 1 - decay
        state, states = torch.zeros(len(x), x.shape[2]), []
        for now in (gain.float() * x.float()).unbind(1):
            state = decay.float() * state + now
            states.append(state)
        return torch.stack(states, 1)


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.memory, self.out = nn.Linear(4, 32), Memory(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.memory(self.inp(x)))


torch.manual_seed(0)
model = Stream()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(40):
    x = torch.randn(8, 64, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = nn.functional.mse_loss(y.float(), x.cumsum(1) / 64)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
