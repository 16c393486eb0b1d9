"""L-BFGS fits a network whose closure computes in BF16: its line search soon finds no smaller loss, and nothing moves."""

# Thread: https://github.com/lululxvi/deepxde/issues/308 is near: L-BFGS stops early without enough precision
# Finding: weights-stand-still
import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-2, 2, 200)[:, None]
y = (3 * x).sin()
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()
    return loss


for _step in range(40):
    optimizer.step(closure)
