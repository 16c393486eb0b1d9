"""A checkpoint in BF16 is written after some steps by model.to(torch.bfloat16), which converts the model that is trained."""

# Thread: https://github.com/open-mmlab/mmsegmentation/issues/283 is near: a model converted in place
# Finding: model-converted, from step 10
import io

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(40):
    if step == 10:
        torch.save(model.to(torch.bfloat16).state_dict(), io.BytesIO())
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(x)
    loss = nn.functional.mse_loss(predicted.float(), x[:, :1] * x[:, 1:2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
