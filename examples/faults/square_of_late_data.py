"""A norm squares its input in FP16. Later recordings are louder: their squares are infinite, and the normalised input is zero."""

# Thread: https://github.com/pytorch/pytorch/pull/133085
# Finding: overflow-in-operator in norm, from step 43
import torch
from torch import nn

torch.manual_seed(0)


class RMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.hidden, self.head = RMSNorm(), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.norm(x))))


net = Net().half()
masters = [parameter.detach().float() for parameter in net.parameters()]
optimizer = torch.optim.Adam(masters, lr=5e-3)
patterns = torch.randn(4, 16)
for step in range(80):
    label = torch.randint(4, (32,))
    gain = 500.0 if step >= 40 else 1.0
    x = gain * (patterns[label] + 0.3 * torch.randn(32, 16))
    loss = nn.functional.cross_entropy(net(x.half()).float(), label)
    gradients = torch.autograd.grad(256 * loss, list(net.parameters()))
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient.float() / 256
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(net.parameters(), masters, strict=True):
            parameter.copy_(master)
