"""Muon orthogonalises its updates in BF16 on purpose, beside FP32 weights and states."""

# Thread: https://github.com/KellerJordan/Muon
import torch
from torch import nn


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.02, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"]).bfloat16()
                update = update / (update.norm() + 1e-7)
                for _ in range(5):
                    gram = update @ update.T
                    update = 3.4445 * update + (2.0315 * gram @ gram - 4.775 * gram) @ update
                weight.add_(update.float(), alpha=-group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
optimizer = Muon([model[0].weight, model[2].weight])
for step in range(60):
    x = torch.randn(128, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
