"""NaNs in the gradients are replaced by zeros before the step: the loop continues, and part of the model gets no
gradient."""

# Thread: https://github.com/AI-Hypercomputer/maxtext/pull/3721
# Finding: gradients-replaced, from step 0
import torch
from torch import nn

torch.manual_seed(0)


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, 24)
        self.score = nn.Linear(24, 1)

    def forward(self, x):
        features = self.encode(x) * (x[:, :1] > 0.5)
        # The square root has no gradient at zero.
        return self.score(features) + features.square().sum(1, keepdim=True).sqrt()


model = Pooler()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(32, 12)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0)
    optimizer.step()
