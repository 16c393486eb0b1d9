"""A CNN with BatchNorm in FP32; zero_grad fills the gradients with zeros instead of freeing them."""

# Thread: as batchnorm_half.py and never_zeroed.py, done right
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(25):
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
