"""A moving average of activations kept in a BF16 buffer: with a decay of 0.999 it never moves."""

# Thread: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
# Finding: buffer-stops-changing in 2, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Centred(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.full((width,), 2.0, dtype=torch.bfloat16))

    def forward(self, x):
        if self.training:
            # lerp by hand: the difference is far below half a unit in the last place of the mean.
            self.mean += 0.001 * (x.detach().mean(0).bfloat16() - self.mean)
        return x - self.mean


model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), Centred(128), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(15):
    x = torch.randn(64, 16)
    y = x[:, :4].argmax(1)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(x)
    loss = nn.functional.cross_entropy(scores.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
