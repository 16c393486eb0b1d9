"""Distances of map coordinates in metres, by torch.cdist in FP32: the squares of the coordinates swallow those of distances."""

# Thread: https://github.com/pytorch/pytorch/issues/57690
# Finding: fp32-too-coarse in distances, from step 1
import torch
from torch import nn

torch.manual_seed(0)
CORNER = torch.tensor([512_000.0, 5_403_000.0])


class Distances(nn.Module):
    def __init__(self, stations):
        super().__init__()
        self.register_buffer("stations", stations)
        self.log_range = nn.Parameter(torch.tensor(5.0))

    def forward(self, points):
        return -torch.cdist(points, self.stations) / self.log_range.exp()


class Map(nn.Module):
    def __init__(self, stations, readings):
        super().__init__()
        self.distances, self.correct = Distances(stations), nn.Linear(1, 1)
        self.register_buffer("readings", readings)

    def forward(self, points):
        with torch.autocast("cpu", enabled=False):
            near = self.distances(points).softmax(-1) @ self.readings
        return self.correct(near[:, None])[:, 0].float()


def field(points):
    return (0.005 * (points - CORNER)).sin().sum(-1)


stations, points = (CORNER + 1500 * torch.rand(size, 2) for size in (200, 1500))
model = Map(stations, field(stations))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(len(points), (128,))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(points[rows])
    loss = nn.functional.mse_loss(output, field(points[rows]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
