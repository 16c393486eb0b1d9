"""FP16 autocast with a GradScaler at its defaults: it skips a step or two while it finds its scale."""

# Thread: as resnet_initial_scale.py, at torch's default scale
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y) * 4
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
