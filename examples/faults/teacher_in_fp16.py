"""A teacher is cast to FP16, which makes its running variances infinite: it gives the same output for every input."""

# Thread: https://github.com/NVIDIA/apex/pull/144
# Finding: divisor-infinite, from step 1
import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
# Trained elsewhere, on features in their own units.
teacher[0].running_var.fill_(1e6)
teacher.eval().half()
student = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(30):
    x = 1000 * torch.randn(64, 8)
    with torch.no_grad():
        target = teacher(x.half()).float().softmax(-1)
    loss = nn.functional.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
