"""One batch of every eight holds an outlier that overflows at any scale the rest can use: the scale falls for ever."""

# Thread: https://github.com/verl-project/verl/issues/4036
# Finding: overflow-recurs, from step 5
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(64):
    x, y = torch.randn(32, 10), torch.randn(32, 1)
    if step % 8 == 5:
        y[3] = 3e7
    with torch.autocast("cpu", torch.float16):
        prediction = model(x)
    loss = (prediction.float() - y).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
