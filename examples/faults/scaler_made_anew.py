"""The GradScaler is made inside of the function that trains one step: the scale that it lowers is thrown away with it."""

# Thread: https://github.com/conservationtechlab/animl-py/issues/298
# Finding: scaler-made-anew, from step 0
import torch
from torch import nn

torch.manual_seed(0)


def train_step(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        predicted = model(x)
    loss = nn.functional.mse_loss(predicted.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


model = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
distances = torch.randn(10, 2)
for step in range(25):
    x = torch.randn(16, 10)
    train_step(model, optimizer, x, 300 + 40 * (x @ distances))
