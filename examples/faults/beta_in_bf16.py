"""An optimizer's state holds beta2 = 0.999 in the weights' BF16, where it is 1: the bias correction divides by zero."""

# Thread: https://github.com/keras-team/keras/pull/21238
# Finding: constant-is-one, from step 1
import torch
from torch import nn


class SmallAdam(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3, beta1=0.9, beta2=0.999):
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["square"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["beta2"] = weight.new_tensor(group["beta2"])
                    state["power"] = weight.new_tensor(1.0)
                state["power"] *= state["beta2"]
                gradient = weight.grad.float()
                state["mean"].lerp_(gradient, 1 - group["beta1"])
                state["square"].lerp_(gradient.square(), 1 - group["beta2"])
                square = state["square"] / (1 - state["power"])
                weight -= group["lr"] * state["mean"] / (square.sqrt() + 1e-8)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).bfloat16()
optimizer = SmallAdam(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(64, 16)
    loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
