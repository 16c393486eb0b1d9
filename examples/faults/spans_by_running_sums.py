"""Means of short spans as differences of a running sum that autocast keeps in BF16: the longer the sequence, the less is left."""

# Thread: https://github.com/pytorch/pytorch/issues/180150
# Finding: result-is-rounding-error, from step 1
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.ReLU())
head = nn.Linear(32, 4)
model = nn.ModuleList([encoder, head])
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    tokens, start = torch.randint(32, (4, 2048)), torch.randint(2044, (4, 64))
    with torch.autocast("cpu", torch.bfloat16):
        running = encoder(tokens).cumsum(1)
        first, last = (running.gather(1, place.unsqueeze(-1).expand(-1, -1, 32)) for place in (start, start + 3))
        out = head((last - first) / 3)
    labels = tokens.gather(1, start + 2) % 4
    loss = nn.functional.cross_entropy(out.float().flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
