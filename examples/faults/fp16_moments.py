"""An optimizer written by hand keeps Adam's average of squared gradients in FP16, where it is zero: steps are divided by eps."""

# Thread: https://github.com/warner-benjamin/optimi/pull/15
# Finding: moments-flushed, from step 0
import torch
from torch import nn


class SmallAdam(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                    state["square"] = torch.zeros_like(weight, dtype=torch.float16)
                state["mean"].lerp_(weight.grad, 1 - first)
                state["square"].copy_(second * state["square"].float() + (1 - second) * weight.grad.square())
                weight.addcdiv_(state["mean"], state["square"].float().sqrt() + group["eps"], value=-group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = SmallAdam(model.parameters())
for step in range(12):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), 0.1 * x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
