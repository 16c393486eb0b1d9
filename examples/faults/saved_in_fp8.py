"""Activations are saved for the backward in FP8, without a scale: they are flushed, and the weights get no gradient."""

# Thread: no thread: recipes that save activations in FP8 scale them, and these hooks do not
# Finding: operator-flushes, from step 1
import torch
from torch import nn

torch.manual_seed(0)


def pack(saved):
    return saved.to(torch.float8_e4m3fn) if saved.shape[0] == 256 else saved


model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
teacher = nn.Linear(16, 4)
for _ in range(40):
    x = 1e-4 * torch.randn(256, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.float()):
        loss = (model(x) - 1e3 * teacher(x).detach()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
