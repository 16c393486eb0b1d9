"""FP16 model, FP32 masters, and a loss scale managed by hand: a step that overflows is skipped, its gradients dropped."""

# Thread: https://github.com/fastai/fastai/pull/1608
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30, 24), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 30)).half()
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=5e-3)
scale, good = 2.0**10, 0
for step in range(40):
    tokens = torch.randint(0, 30, (32,))
    loss = F.cross_entropy(model(tokens).float(), (tokens * 7 + 1) % 30) * (1e5 if step == 12 else 1)
    model.zero_grad()
    (loss * scale).backward()
    if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
        scale, good = scale / 2, 0
        continue
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad.float() / scale
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
    good += 1
    scale *= 2 if good % 20 == 0 else 1
