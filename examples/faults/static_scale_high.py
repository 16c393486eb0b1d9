"""A static loss scale that overflows at every step: the model never learns."""

# Thread: no thread: a static scale is what legacy loops have; torch.amp.GradScaler is made static by its factors
# Finding: scale-too-high, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_factor=1.0000001, backoff_factor=0.9999999)
for step in range(20):
    x, y = torch.randn(32, 20), torch.randint(0, 5, (32,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
