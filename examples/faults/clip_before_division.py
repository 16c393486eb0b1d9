"""A loop with a loss scale of its own clips the gradients to a norm of 1 before it divides them by that scale."""

# Thread: https://github.com/allenai/allennlp/pull/5426
# Finding: unscale-missing, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
truth = torch.randn(24, 4)
scale = 1024.0
for _ in range(40):
    x = torch.randn(64, 24)
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    loss = nn.functional.mse_loss(scores.float(), x @ truth)
    optimizer.zero_grad()
    (loss * scale).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        p.grad.div_(scale)
    optimizer.step()
