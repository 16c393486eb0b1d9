"""An optimizer rounds its updates of BF16 weights stochastically, but multiplies the weights by 1 - lr * decay before: that
rounds back."""

# Thread: https://github.com/Nerogar/OneTrainer/issues/996
# Finding: weight-decay-lost
import torch
from torch import nn


def write(weight, wide):
    """Round to BF16, up or down by chance."""
    bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
    weight.copy_((bits & -(1 << 16)).view(torch.float32))


class SignDescent(torch.optim.Optimizer):
    """Lion without its interpolation."""

    def __init__(self, params, lr, decay):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight, dtype=torch.float32))
                average.lerp_(weight.grad.float(), 0.1)
                weight.mul_(1 - group["lr"] * group["decay"])
                write(weight, weight.float() - group["lr"] * average.sign())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1)).bfloat16()
optimizer = SignDescent(model.parameters(), lr=1e-3, decay=1.0)
for step in range(120):
    x = torch.randn(64, 24).bfloat16()
    loss = (model(x).float() - x.float().mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
