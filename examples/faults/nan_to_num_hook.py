"""Hooks on the weights turn infinite gradients into zeros within the backward: the GradScaler sees no overflow and keeps its
scale."""

# Thread: https://github.com/ultralytics/yolov5/pull/8598
# Finding: gradients-replaced, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(3, 12, 5), nn.SiLU(), nn.Flatten(), nn.Linear(12 * 28, 3))
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for step in range(25):
    x, y = torch.randn(24, 3, 32), torch.randint(0, 3, (24,))
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    loss = nn.functional.cross_entropy(scores.float(), y, reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
