"""BF16 weights with AdamW: lr * weight_decay is far below half of a last place, so nothing decays."""

# Thread: https://github.com/Nerogar/OneTrainer/issues/996
# Finding: weight-decay-lost
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(torch.bfloat16)
opt = torch.optim.AdamW(net.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
for step in range(40):
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    loss = (net(x).float() - x.float().sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
