"""A loop without an optimizer subtracts updates from BF16 weights by hand: each is below half a unit in the last place."""

# Thread: https://github.com/fla-org/flame/issues/47
# Finding: buffer-stops-changing, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
weights = list(model.parameters())
for step in range(16):
    x = torch.randn(32, 16)
    loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x[:, :4])
    gradients = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(1e-3 * gradient.float())
