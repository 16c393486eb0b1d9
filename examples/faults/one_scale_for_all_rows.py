"""Activations are cast to FP8 with one scale for the whole batch. One row is so large that the others become zero."""

# Thread: https://github.com/pytorch/ao/issues/1793
# Finding: operator-flushes in 0, from step 1
import torch
from torch import nn

torch.manual_seed(0)


def cast(x):
    scale = 448 / x.abs().amax()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return cast(x) @ cast(weight).t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class FP8Linear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


model = nn.Sequential(FP8Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
patterns = torch.randn(4, 16)
for step in range(60):
    label = torch.randint(4, (32,))
    x = patterns[label] + 0.3 * torch.randn(32, 16)
    x[0] *= 1e6
    loss = nn.functional.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
