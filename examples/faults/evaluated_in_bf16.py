"""Every five steps the model is evaluated in BF16 and converted back, which rounds the weights that are trained."""

# Thread: https://github.com/ultralytics/ultralytics/issues/21283 is near: the model of a training is validated in half precision
# Finding: masters-overwritten
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)


def batch():
    x = torch.randn(64, 16)
    return x, x[:, :1] * x[:, 1:2]


def validate():
    model.eval().to(torch.bfloat16)
    with torch.no_grad():
        x, target = batch()
        nn.functional.mse_loss(model(x.bfloat16()).float(), target)
    model.float().train()


for step in range(40):
    x, target = batch()
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        validate()
