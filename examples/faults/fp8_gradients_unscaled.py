"""An encoder's head casts its gradients to FP8 without a scale: all are flushed, and nothing before the head learns."""

# Thread: no thread: FP8 recipes take a scale for each tensor, which this cast by hand lacks
# Finding: operator-flushes, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(torch.float8_e5m2).float()
        return grad @ weight, grad.t() @ x


class Head(nn.Linear):
    def forward(self, x):
        return Narrow.apply(x, self.weight) + self.bias


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = Head(32, 8)

    def forward(self, x):
        return 1e-3 * self.head(self.encoder(x))


model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(25):
    x = torch.randn(512, 12)
    loss = nn.functional.mse_loss(model(x), 1e-3 * x[:, :8].sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
