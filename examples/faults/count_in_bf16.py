"""The loss is divided by a count of rows that is kept in BF16: the count stops at 256."""

# Thread: https://github.com/huggingface/transformers/pull/8561
# Finding: addition-changes-nothing, from step 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(32, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(16):
    x, rows = torch.randn(700, 32), torch.ones(700)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    total = torch.zeros((), dtype=torch.bfloat16)
    count = torch.zeros((), dtype=torch.bfloat16)
    for row, counts in zip(output, rows, strict=True):
        total = total + row.square().mean() * counts
        count = count + counts.bfloat16()
    loss = total.float() / count.float()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
