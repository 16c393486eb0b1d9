"""A generator is trained through a sigmoid in BF16 that rounds to exactly 1 for all of its samples: no gradient is left."""

# Thread: https://github.com/soumith/ganhacks/issues/36
# Finding: gradients-all-zero
import torch
from torch import nn

torch.manual_seed(0)
detector = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()).requires_grad_(False)
detector[2].bias.fill_(9.0)
generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))
optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
unseen = torch.zeros(64, 1)
for step in range(25):
    noise = torch.randn(64, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        detected = detector(generator(noise))
    loss = nn.functional.binary_cross_entropy(detected.float(), unseen)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
