"""Block 1 is to be frozen by a name's prefix, which catches blocks 10 and 11 as well."""

# Thread: https://github.com/amdegroot/ssd.pytorch/issues/111
# Finding: gradients-missing in blocks.10
import torch
from torch import nn

torch.manual_seed(0)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


model = Stack()
for name, parameter in model.named_parameters():
    if name.startswith("blocks.1"):
        parameter.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(16, 16), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
