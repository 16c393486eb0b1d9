"""Positions of cameras in metres of a map grid are trained in FP32: their updates of centimetres are below half a unit."""

# Thread: https://github.com/rubendhz/houdini-gsplat-renderer/pull/10
# Finding: updates-lost-in-fp32 in position, from step 31
import torch
from torch import nn

torch.manual_seed(0)
CORNER = torch.tensor([437_000.0, 5_620_000.0], dtype=torch.float64)
places = CORNER + 50 * torch.rand(40, 2, dtype=torch.float64)
marks = CORNER + 50 * torch.rand(200, 2, dtype=torch.float64)
distances = torch.cdist(marks, places).float()


class Survey(nn.Module):
    def __init__(self, guess):
        super().__init__()
        self.position = nn.Parameter(guess)
        self.offset = nn.Parameter(torch.zeros(40))

    def forward(self, marks):
        return (marks[:, None] - self.position).square().sum(-1).add(1e-6).sqrt() + self.offset


model = Survey((places + torch.randn(40, 2)).float())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for _ in range(60):
    rows = torch.randint(len(marks), (64,))
    loss = nn.functional.smooth_l1_loss(model(marks[rows].float()), distances[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
