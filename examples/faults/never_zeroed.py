"""The BF16 branch of the loop never calls zero_grad(): every step uses the sum of all gradients so far."""

# Thread: https://github.com/facebookresearch/nwm/issues/16
# Finding: gradients-never-zeroed, from step 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
use_bf16 = True
for step in range(25):
    x = torch.randn(32, 12)
    if use_bf16:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - x).float().square().mean()
        loss.backward()
    else:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
    optimizer.step()
