"""Adam's averages are in BF16, but with a beta2 of 0.95: they decay by more than rounding holds back. The weights are FP32."""

# Thread: https://github.com/pytorch/torchtitan/pull/2732
import torch
from torch import nn


class NarrowAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                for name in ("average", "squares"):
                    state.setdefault(name, torch.zeros_like(weight, dtype=torch.bfloat16))
                state["step"] = step = state.get("step", 0) + 1
                gradient = weight.grad.bfloat16()
                state["average"].lerp_(gradient, 1 - beta1)
                state["squares"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (state["squares"].float() / (1 - beta2**step)).sqrt() + group["eps"]
                weight.addcdiv_(state["average"].float() / (1 - beta1**step), root, value=-group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 4))
optimizer = NarrowAdam(model.parameters(), lr=1e-3)
for step in range(120):
    x = torch.randn(64, 16)
    loss = (model(x) - x[:, :4].tanh()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
