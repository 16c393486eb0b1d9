"""A dict of FP16 shadow tensors follows the weights with a decay of 0.9999: it never moves."""

# Thread: https://github.com/NUS-HPC-AI-Lab/VideoSys/issues/6
# Finding: buffer-stops-changing, from step 1
import torch
from torch import nn

torch.manual_seed(3)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(12, 64)
        self.out = nn.Linear(64, 24)

    def forward(self, z):
        return self.out(torch.relu(self.project(z)))


model = Generator()
shadow = {name: value.detach().clone().half() for name, value in model.named_parameters()}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    z = torch.randn(64, 12)
    loss = (model(z) - torch.cat([z, z * z], 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, value in model.named_parameters():
            shadow[name].mul_(0.9999).add_(value.half(), alpha=1 - 0.9999)
