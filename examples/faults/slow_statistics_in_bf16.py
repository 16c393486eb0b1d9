"""BatchNorm's running statistics are in BF16, with a momentum of 0.01: they stop at some distance from those of the data."""

# Thread: https://github.com/facebookresearch/fairscale/issues/442
# Finding: buffer-stops-changing in 1, from step 101
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=0.01), nn.ReLU(), nn.Linear(32, 4)).bfloat16()
nn.init.constant_(model[0].bias, 4.0)
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.05)
for _ in range(160):
    x, y = torch.randn(512, 8), torch.randint(4, (512,))
    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    model.zero_grad()
    loss.backward()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad.float()
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
