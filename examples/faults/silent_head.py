"""An auxiliary head whose loss weighs 1e-8: at the loss scale that suits the main head FP16 flushes all its gradients."""

# Thread: no thread: a weight for each loss is what users ask for in https://github.com/Lightning-AI/pytorch-lightning/issues/9799
# Finding: gradients-all-zero in auxiliary
import torch
from torch import nn

torch.manual_seed(0)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.main = nn.Linear(32, 1)
        self.auxiliary = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.main(self.trunk(x)), self.auxiliary(x)


model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
for step in range(30):
    x, kinds = torch.randn(64, 16), torch.randint(0, 4, (64,))
    with torch.autocast("cpu", torch.float16):
        value, logits = model(x)
    loss = (value.float().squeeze(1) - 3 * x.sum(1)).square().mean()
    loss = loss + 1e-8 * nn.functional.cross_entropy(logits.float(), kinds)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
