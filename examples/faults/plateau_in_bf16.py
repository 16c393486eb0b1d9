"""ReduceLROnPlateau watches an error in BF16, whose steps hide the progress: the learning rate falls to nothing."""

# Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/673
# Finding: weights-stand-still
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=2, eps=0.0)
x, held_out = torch.randn(512, 8), torch.randn(512, 8)


def truth(x):
    return x.sum(-1, keepdim=True) + (2 * x[:, :1]).sin()


for _ in range(120):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), truth(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        error = (model(held_out) - truth(held_out).bfloat16()).square().mean()
    schedule.step(error.item())
