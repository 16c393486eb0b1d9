"""One forward overflows FP16; the scaler skips its step, and the BatchNorm keeps the NaN in its running statistics."""

# Thread: https://github.com/pytorch/pytorch/issues/88474
# Finding: statistics-broken in 1, from step 5
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(16):
    x = torch.rand(4, 3, 10)
    if step == 5:
        x[0] *= 1e6
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(network(x).float(), torch.randint(0, 2, (4,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
