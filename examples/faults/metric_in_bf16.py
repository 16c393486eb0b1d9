"""The mean loss of a validation is added up in BF16: its last bit hides all progress, and the schedule lowers the rate."""

# Thread: https://github.com/pytorch/xla/pull/2425
# Finding: metric-stands-still, from step 18
import torch
from torch import nn

torch.manual_seed(0)


def validate(model, batches):
    total = torch.zeros((), dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for x, y in batches:
            total += nn.functional.mse_loss(model(x).float(), y)
    return (total / len(batches)).item()


model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
truth = torch.randn(16, 1)
held_out = [(x, torch.sin(x @ truth)) for x in torch.randn(100, 32, 16)]
best = float("inf")
for step in range(60):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), torch.sin(x @ truth))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        metric = validate(model, held_out)
        if metric >= best:
            optimizer.param_groups[0]["lr"] *= 0.3
        best = min(best, metric)
