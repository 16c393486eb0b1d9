"""Two rows of one batch hold NaN, from a division in the preprocessing."""

# Thread: https://github.com/kohya-ss/sd-scripts/issues/881
# Finding: batch-not-finite, from step 7
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.rand(20, 16, 8)
data[7, 3] = float("nan")
data[7, 11, 2] = float("nan")
for step, batch in enumerate(data):
    loss = (model(batch) - batch.nan_to_num().mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
