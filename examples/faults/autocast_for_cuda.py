"""Autocast and the scaler are for CUDA, the tensors are on a CPU: the code that asks for FP16 runs in FP32."""

# Thread: https://github.com/pytorch/pytorch/issues/114458
# Finding: autocast-for-another-device
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for step in range(20):
    x, y = torch.randn(64, 40), torch.randint(0, 10, (64,))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
