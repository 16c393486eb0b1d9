"""Adam steps FP16 weights: its eps of 1e-8 is zero in FP16, and the squares of small gradients are zero as well."""

# Thread: https://github.com/google-deepmind/optax/issues/1754
# Finding: epsilon-zero
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(16, 16).half()
    loss = nn.functional.cross_entropy(model(x).float(), torch.randint(0, 4, (16,))) * 1e-2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
