"""A second-order optimizer squares gradients that a GradScaler has multiplied and not divided. Its steps are far too small."""

# Thread: https://github.com/Liuhong99/Sophia/issues/19
# Finding: scaled-plus-unscaled
import torch
from torch import nn

torch.manual_seed(0)


class Diagonal(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def measure(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state.setdefault(parameter, {})
            state.setdefault("curvature", torch.zeros_like(parameter))
            state["curvature"].mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=3.2)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            update = (momentum / (0.04 * state["curvature"] + 1e-12)).clamp_(-1, 1)
            parameter.add_(update, alpha=-self.param_groups[0]["lr"])


model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))
optimizer = Diagonal(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
means = torch.randn(5, 12)
for step in range(80):
    label = torch.randint(5, (64,))
    x = means[label] + 0.7 * torch.randn(64, 12)
    if step % 4 == 0:
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        sampled = torch.distributions.Categorical(logits=logits.detach().float()).sample()
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(logits.float(), sampled)).backward()
        optimizer.measure()
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(logits.float(), label)).backward()
    scaler.step(optimizer)
    scaler.update()
