"""Nearest neighbours by squares and a product that autocast makes in BF16: far from the origin the distances cancel to noise."""

# Thread: https://github.com/pytorch/pytorch/issues/136748
# Finding: choices-differ, from step 1
import torch
from torch import nn

torch.manual_seed(0)


class Terrain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, points, heights):
        squares = points.square().sum(1)
        distances = squares.unsqueeze(1) + squares.unsqueeze(0) - 2 * points @ points.T
        near = distances.topk(8, dim=1, largest=False).indices
        return self.net(torch.cat([points[near].mean(1) - points, heights[near].mean(1)], 1))


model = Terrain()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(40):
    points, heights = 80 + 20 * torch.rand(256, 2), torch.randn(256, 1)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(points, heights)
    loss = (predicted.float() - heights).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
