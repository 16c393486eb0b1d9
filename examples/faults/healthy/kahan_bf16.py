"""Pure BF16 weights with an SGD that stores their rounding errors and adds them in later steps (Kahan)."""

# Thread: as bf16_finetune.py, done right
import torch
from torch import nn

torch.manual_seed(1)


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rest = self.state[p].setdefault("rest", torch.zeros_like(p)).add_(p.grad, alpha=-group["lr"])
                before = p.clone()
                rest.add_(before.sub_(p.add_(rest)))


backbone = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 8)).bfloat16()
optimizer = KahanSGD(backbone.parameters(), lr=1e-2)
for step in range(40):
    x, y = torch.randn(32, 48, dtype=torch.bfloat16), torch.randint(0, 8, (32,))
    loss = nn.functional.cross_entropy(backbone(x).float(), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(loss.item())
