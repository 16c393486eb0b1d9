"""A recurrence's gate begins near 1: in BF16 its sigmoid rounds to 1, where its gradient is zero, so that it never learns."""

# Thread: https://github.com/tenstorrent/tt-metal/issues/55724
# Finding: result-is-rounding-error in mixer, from step 1
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Linear(16, 16)
        nn.init.zeros_(self.decay.weight)
        nn.init.constant_(self.decay.bias, 7.0)

    def forward(self, x):
        gate = torch.sigmoid(self.decay(x))
        kept = gate.flip(1).cumprod(1).flip(1)
        return (kept.float() * x.float()).sum(1) / 20


torch.manual_seed(0)
model = nn.Sequential()
model.add_module("inputs", nn.Linear(1, 16))
model.add_module("mixer", Mixer())
model.add_module("output", nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
kernel = 0.97 ** torch.arange(100.0).flip(0)
for step in range(40):
    x = torch.randn(32, 100, 1) + 0.3 * torch.randn(32, 1, 1)
    target = (x[..., 0] * kernel).sum(1, keepdim=True) / 10
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
