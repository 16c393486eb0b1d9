"""Sharpness-aware minimisation moves the weights along gradients that the GradScaler has not checked: at its first scale they
overflow."""

# Thread: https://github.com/davda54/sam/issues/97
# Finding: weights-broken-by-loop in 0, from step 0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")


def scaled_loss(x, y):
    with torch.autocast("cpu", torch.float16):
        scores = model(x)
    return scaler.scale(nn.functional.cross_entropy(scores.float(), y, reduction="sum"))


for step in range(20):
    x, y = torch.randn(64, 20), torch.randint(0, 5, (64,))
    optimizer.zero_grad()
    scaled_loss(x, y).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    moves = torch._foreach_mul(gradients, 0.05 / torch.nn.utils.get_total_norm(gradients))
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    scaled_loss(x, y).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    scaler.step(optimizer)
    scaler.update()
