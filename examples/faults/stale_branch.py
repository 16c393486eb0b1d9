"""Only the branch of the task at hand is zeroed: the other one is stepped again with the gradients of the task before."""

# Thread: https://github.com/pytorch/pytorch/issues/47175
# Finding: gradients-stale in heads.segment, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.heads = nn.ModuleDict({"segment": nn.Linear(32, 8), "depth": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.trunk(x)))


model = MultiTask()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(24):
    task = ("segment", "depth")[step % 2]
    x = torch.randn(16, 16)
    model.trunk.zero_grad()
    model.heads[task].zero_grad()
    out = model(x, task)
    loss = out.square().mean() if task == "depth" else nn.functional.cross_entropy(out, torch.randint(0, 8, (16,)))
    loss.backward()
    optimizer.step()
