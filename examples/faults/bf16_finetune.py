"""Fine-tuning in pure BF16 with a small learning rate: most updates are below half of a weight's last place."""

# Thread: https://github.com/meta-pytorch/torchtune/issues/2254
# Finding: updates-lost
import torch
from torch import nn

torch.manual_seed(1)
backbone = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 8)).bfloat16()
optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-4)
for step in range(40):
    x, y = torch.randn(32, 48, dtype=torch.bfloat16), torch.randint(0, 8, (32,))
    loss = nn.functional.cross_entropy(backbone(x).float(), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(loss.item())
