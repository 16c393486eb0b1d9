"""An optimizer keeps FP32 masters among its states: load_state_dict casts them to the BF16 of the weights on resuming."""

# Thread: https://github.com/pytorch/pytorch/issues/43706
# Finding: states-cast-by-loading, from step 0
import io

import torch
from torch import nn

torch.manual_seed(0)


class MasterSGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["master"] = weight.float()
                state["master"] -= group["lr"] * weight.grad.to(state["master"].dtype)
                weight.copy_(state["master"])


model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
optimizer = MasterSGD(model.parameters(), lr=1e-3)
for weight in model.parameters():
    weight.grad = torch.zeros_like(weight)
optimizer.step()
checkpoint = io.BytesIO()
torch.save(optimizer.state_dict(), checkpoint)
checkpoint.seek(0)

optimizer = MasterSGD(model.parameters(), lr=1e-3)
optimizer.load_state_dict(torch.load(checkpoint))
for step in range(25):
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
