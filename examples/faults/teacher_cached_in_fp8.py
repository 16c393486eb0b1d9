"""A teacher's logits are computed once and kept in FP8, in which its probabilities of the smaller classes are off by half."""

# Thread: no thread: a cache of logits in FP8, whose numbers from 16 on lie 2 apart
# Finding: prepared-in-16-bits
import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
teacher[2].weight.data.mul_(100)
inputs = torch.randn(2048, 16)
with torch.no_grad():
    logits = teacher(inputs).to(torch.float8_e4m3fn)
probabilities = logits.float().softmax(-1)
student = nn.Linear(16, 10)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
for _ in range(40):
    chosen = torch.randint(2048, (256,))
    loss = nn.functional.cross_entropy(student(inputs[chosen]), probabilities[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
