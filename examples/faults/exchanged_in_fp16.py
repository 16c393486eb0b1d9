"""Workers send their gradients in FP16 to be averaged. The targets are in metres, so most gradients are below FP16's range."""

# Thread: https://github.com/horovod/horovod/issues/1699
# Finding: gradients-flushed-before-step, from step 1
import torch
from torch import nn

torch.manual_seed(0)
WORKERS = 4
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-15)
for step in range(60):
    sent = []
    for worker in range(WORKERS):
        x = torch.rand(64, 4)
        with torch.autocast("cpu", torch.bfloat16):
            deflection = model(x) * 2e-3
        loss = nn.functional.mse_loss(deflection.float(), 2e-3 * x[:, :1] * torch.sin(3 * x[:, 1:2]))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        sent.append([(gradient / WORKERS).half() for gradient in gradients])
    for parameter, *parts in zip(model.parameters(), *sent, strict=True):
        parameter.grad = torch.stack(parts).sum(0).float()
    optimizer.step()
