"""Features stored in FP16 are normalised before the training: their squares overflow, and all samples are NaN."""

# Thread: https://github.com/IsoNet-cryoET/IsoNet2/issues/34
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
raw = (300 + 3 * torch.randn(2048, 8)).half()
target = (raw.float() - 300).sum(1, keepdim=True)
mean = raw.mean(0)
deviation = ((raw * raw).mean(0) - mean**2).sqrt()
features = ((raw - mean) / deviation).float()

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    rows = torch.randint(0, len(features), (128,))
    loss = nn.functional.mse_loss(model(features[rows]), target[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
