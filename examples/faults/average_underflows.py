"""The weights' moving average is made in FP16: the share of a new weight that is taken is below FP16's smallest number."""

# Thread: https://github.com/OpenNMT/OpenNMT-py/pull/1294
# Finding: operator-flushes, from step 1
import torch
from torch import nn

torch.manual_seed(0)
decay = 1e-4
model = nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
nn.init.uniform_(model[0].weight, -1e-4, 1e-4)
average = {name: weight.detach().half() for name, weight in model.named_parameters()}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
for step in range(20):
    tokens = torch.randint(0, 64, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float(), (tokens + 1) % 64)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            update = weight.half() * decay
            average[name].mul_(1 - decay).add_(update)
