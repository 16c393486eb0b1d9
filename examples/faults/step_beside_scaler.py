"""The loop lets the scaler step, and then calls the optimizer's own step: the steps that the scaler skips are taken too."""

# Thread: https://github.com/IAHispano/Applio/pull/860 (optimizer.step() after scaler.step(optimizer): "Simply remove both")
# Finding: stepped-beside-scaler, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 40))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)

for step in range(20):
    tokens = torch.randint(0, 40, (32, 7))
    with torch.autocast("cpu", torch.float16):
        scores = model(tokens[:, :6])
    loss = nn.functional.cross_entropy(scores.float(), tokens[:, 6])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    optimizer.step()
    scaler.update()
    print(f"step {step}: loss {loss.item():.4f}")
